// Random programs of collectives and arithmetic on streams that run late at random, against the same done step by step
// on plain numbers: a wait that is missing anywhere, or memory that goes too early, gives other numbers.
#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "comm/scaled_sum.hpp"
#include "nccl_ranks.hpp"

namespace fsdp::test {
namespace {

constexpr int kBuffers = 4;
constexpr int64_t kNumel = 6;

enum class Kind { kAllGather, kAllGatherPair, kReduceScatter, kScaledReduceScatter, kAllReduce, kBroadcast, kAdd };

/// One step. The same on all ranks.
struct Step {
  Kind kind = Kind::kAdd;
  int buffer = 0;
  int other_buffer = 1;  // of a batch of two
  bool is_in_half = false;  // in the group of ranks with the same parity, instead of the world
  int root = 0;             // modulo the group's size
  bool is_waited_for = false;  // at once; else before its buffer is used again
  bool holds_back = false;     // what uses its buffer next; waited for all the same, at the end of that
  double value = 0;
};

struct Program {
  int world_size = 1;
  std::vector<Step> steps;
};

Program draw_program(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int count) { return static_cast<int>(random() % count); };
  Program program{.world_size = 1 + below(4), .steps = {}};
  for (int i = 0; i < 24; ++i) {
    Step step{.kind = static_cast<Kind>(below(7)), .buffer = below(kBuffers)};
    step.other_buffer = (step.buffer + 1 + below(kBuffers - 1)) % kBuffers;
    step.is_in_half = below(3) == 0;
    step.root = below(4);
    step.is_waited_for = below(4) == 0;
    step.holds_back = below(2) == 0;
    step.value = below(9);
    program.steps.push_back(step);
  }
  return program;
}

using Buffer = std::array<double, kNumel>;
using Buffers = std::array<Buffer, kBuffers>;

/// Keeps numbers exact: they are small multiples of powers of two.
double bounded(double value) { return std::fmod(value, 61.0); }

std::vector<int> members(const Program& program, const Step& step, int rank) {
  std::vector<int> all;
  for (int other = 0; other < program.world_size; ++other)
    if (!step.is_in_half || other % 2 == rank % 2) all.push_back(other);
  return all;
}

Buffer gathered(const std::vector<Buffer>& pieces) {
  Buffer sum{};
  for (size_t from = 0; from < pieces.size(); ++from)
    for (int64_t i = 0; i < kNumel; ++i) sum[i] += static_cast<double>(from + 1) * pieces[from][i];
  for (double& value : sum) value = bounded(value);
  return sum;
}

/// Every rank's buffers after the program, one step after the other.
std::vector<Buffers> expected_buffers(const Program& program) {
  std::vector<Buffers> state(program.world_size);
  for (int rank = 0; rank < program.world_size; ++rank)
    for (int b = 0; b < kBuffers; ++b)
      for (int64_t i = 0; i < kNumel; ++i) state[rank][b][i] = static_cast<double>(rank + 2 * b + i);
  for (const Step& step : program.steps) {
    const auto before = state;
    for (int rank = 0; rank < program.world_size; ++rank) {
      const auto group = members(program, step, rank);
      const auto pieces = [&](int buffer) {
        std::vector<Buffer> all;
        for (const int other : group) all.push_back(before[other][buffer]);
        return all;
      };
      auto& mine = state[rank][step.buffer];
      const auto index = static_cast<double>(std::find(group.begin(), group.end(), rank) - group.begin());
      const double scale = step.kind == Kind::kScaledReduceScatter ? 0.5 : 1;
      switch (step.kind) {
        case Kind::kAllGatherPair:
          state[rank][step.other_buffer] = gathered(pieces(step.other_buffer));
          [[fallthrough]];
        case Kind::kAllGather:
          mine = gathered(pieces(step.buffer));
          break;
        case Kind::kReduceScatter:
        case Kind::kScaledReduceScatter:
        case Kind::kAllReduce:
          for (int64_t i = 0; i < kNumel; ++i) {
            mine[i] = 0;
            for (const Buffer& piece : pieces(step.buffer))
              mine[i] += scale * piece[i] * (step.kind == Kind::kAllReduce ? 1 : index + 1);
            mine[i] = bounded(mine[i]);
          }
          break;
        case Kind::kBroadcast:
          mine = before[group[step.root % group.size()]][step.buffer];
          break;
        case Kind::kAdd:
          for (double& value : mine) value += step.value + rank;
      }
    }
  }
  return state;
}

/// One rank's run of a program on a stream of its own.
class Runner {
 public:
  Runner(NcclRank& rank, const Program& program)
      : rank_(rank), program_(program), stream_(rank.streams->make_stream(StreamPriority::kNormal)) {
    std::vector<int> half;
    for (int other = rank.world->rank() % 2; other < program.world_size; other += 2) half.push_back(other);
    std::vector<int> other_half;
    for (int other = 1 - rank.world->rank() % 2; other < program.world_size; other += 2) other_half.push_back(other);
    // All ranks make all groups, in one order.
    for (const int parity : {0, 1}) {
      const auto& ranks = parity == rank.world->rank() % 2 ? half : other_half;
      if (ranks.empty()) continue;
      if (auto group = rank.world->split(ranks, "half")) half_ = std::move(group);
    }
    for (int b = 0; b < kBuffers; ++b)
      buffers_[b] = at::arange(kNumel, at::kDouble) + static_cast<double>(rank.world->rank() + 2 * b);
  }

  Buffers run() {
    const HostStreams::Current current(stream_);
    for (const Step& step : program_.steps) {
      finish(step.buffer);
      if (step.kind == Kind::kAllGatherPair) finish(step.other_buffer);
      start(step);
      pending_[step.buffer].holds_back = step.holds_back;
      if (step.is_waited_for) finish(step.buffer);
    }
    for (int b = 0; b < kBuffers; ++b) finish(b);
    for (const auto& work : held_back_by_) work->wait();
    rank_.streams->synchronize(stream_);
    Buffers result;
    for (int b = 0; b < kBuffers; ++b) std::memcpy(result[b].data(), buffers_[b].data_ptr(), sizeof(Buffer));
    half_ = nullptr;  // its streams are through before the memory goes
    rank_.world = nullptr;
    return result;
  }

 private:
  struct Pending {
    std::shared_ptr<Work> work;
    std::function<void()> afterwards;  // on the stream
    bool holds_back = false;
  };

  at::Tensor made(int64_t numel) {
    kept_.push_back(at::full({numel}, std::numeric_limits<double>::quiet_NaN(), at::kDouble));
    return kept_.back();
  }

  void finish(int buffer) {
    auto pending = std::exchange(pending_[buffer], {});
    if (!pending.work) return;
    if (!pending.holds_back) {
      pending.work->wait();
    } else {
      if (!pending.work->hold_back(*rank_.world)) throw std::logic_error("it holds nothing back");
      held_back_by_.push_back(pending.work);
    }
    HostStreams::enqueue(stream_, pending.afterwards);
  }

  void start(const Step& step) {
    Communicator& group = step.is_in_half ? *half_ : *rank_.world;
    const auto& buffer = buffers_[step.buffer];
    double* mine = buffer.data_ptr<double>();
    auto& pending = pending_[step.buffer];
    switch (step.kind) {
      case Kind::kAllGather: {
        const auto whole = made(group.size() * kNumel);
        pending = {group.start_all_gather(whole, buffer, "gather"), combine(whole, group.size(), mine)};
        return;
      }
      case Kind::kAllGatherPair: {
        const auto& other = buffers_[step.other_buffer];
        const std::vector<at::Tensor> wholes = {made(group.size() * kNumel), made(group.size() * kNumel)};
        const auto work = group.start_all_gather_batch(wholes, std::vector<at::Tensor>{buffer, other}, "gather");
        pending = {work, combine(wholes[0], group.size(), mine)};
        pending_[step.other_buffer] = {work, combine(wholes[1], group.size(), other.data_ptr<double>())};
        return;
      }
      case Kind::kReduceScatter:
      case Kind::kScaledReduceScatter:
        pending = start_reduce(group, step, mine);
        return;
      case Kind::kAllReduce:
        pending = {group.start_all_reduce(buffer, ReduceOp::kSum, "sum"), [mine] { bound(mine); }};
        return;
      case Kind::kBroadcast:
        pending = {group.start_broadcast(buffer, step.root % group.size(), "broadcast"), [] {}};
        return;
      case Kind::kAdd:
        HostStreams::enqueue(stream_, [mine, value = step.value + rank_.world->rank()] {
          for (int64_t i = 0; i < kNumel; ++i) mine[i] += value;
        });
    }
  }

  Pending start_reduce(Communicator& group, const Step& step, double* mine) {
    const auto weighted = made(group.size() * kNumel);
    const auto result = made(kNumel);
    HostStreams::enqueue(stream_, [mine, ranks = group.size(), to = weighted.data_ptr<double>()] {
      for (int64_t at = 0; at < ranks * kNumel; ++at)
        to[at] = mine[at % kNumel] * static_cast<double>(at / kNumel + 1);
    });
    auto work = step.kind == Kind::kReduceScatter
                    ? group.start_reduce_scatter(result, weighted, ReduceOp::kSum, "reduce")
                    : scaled_sums_of(group, {.dtype = at::kDouble, .scale = 0.5})
                          ->start_scaled_reduce_scatter({&result, 1}, {&weighted, 1}, 0.5, "reduce");
    return {std::move(work), [mine, from = result.data_ptr<double>()] {
              std::copy_n(from, kNumel, mine);
              bound(mine);
            }};
  }

  std::function<void()> combine(const at::Tensor& whole, int64_t ranks, double* mine) const {
    return [from = whole.data_ptr<double>(), ranks, mine] {
      for (int64_t i = 0; i < kNumel; ++i) {
        mine[i] = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) mine[i] += static_cast<double>(rank + 1) * from[rank * kNumel + i];
      }
      bound(mine);
    };
  }

  static void bound(double* values) {
    for (int64_t i = 0; i < kNumel; ++i) values[i] = bounded(values[i]);
  }

  NcclRank& rank_;
  const Program& program_;
  StreamHandle stream_;
  std::shared_ptr<Communicator> half_;
  std::array<at::Tensor, kBuffers> buffers_;
  std::array<Pending, kBuffers> pending_;
  std::vector<std::shared_ptr<Work>> held_back_by_;
  std::vector<at::Tensor> kept_;  // host memory knows no streams that could hold it back
};

/// How many programs give other numbers than they should.
int wrong_programs(uint64_t first_seed, int count, bool forgets_waits) {
  int wrong = 0;
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    CAPTURE(seed);
    const Program program = draw_program(seed);
    const NcclSubstitute nccl({.polls = static_cast<int>(seed % 3)});
    std::vector<Buffers> results(program.world_size);
    const HostStreams::Options streams{
        .seed = seed, .max_delay = std::chrono::microseconds(400), .forgets_waits = forgets_waits};
    const NcclRanksOptions options{.world_size = program.world_size, .streams = streams};
    const auto errors = errors_on_nccl(nccl, options, [&](NcclRank& rank) {
      const int index = rank.world->rank();
      results[index] = Runner(rank, program).run();
    });
    CHECK(errors == no_errors(program.world_size));
    CHECK(nccl.misuses().empty());
    const bool is_right = results == expected_buffers(program);
    if (!forgets_waits) CHECK(is_right);
    if (!is_right) ++wrong;
  }
  return wrong;
}

}  // namespace

TEST_CASE("random programs give the numbers of plain arithmetic, however late streams run", "[comm][nccl_programs]") {
  CHECK(wrong_programs(/*first_seed=*/1, /*count=*/60, /*forgets_waits=*/false) == 0);
}

TEST_CASE("programs whose streams do not wait give other numbers", "[comm][nccl_programs]") {
  CHECK(wrong_programs(/*first_seed=*/1, /*count=*/10, /*forgets_waits=*/true) > 5);
}

}  // namespace fsdp::test
