// What only the native NCCL communicator promises: launches, streams, lifetimes, scaled sums. Values of plain
// collectives are in test_collectives.cpp.
#include <catch2/catch.hpp>

#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "comm/debug/fake_collectives.hpp"
#include "comm/debug/late_delivery.hpp"
#include "comm/scaled_sum.hpp"
#include "fsdp/error.hpp"
#include "fsdp/simulated_network.hpp"
#include "fsdp/testing/recording.hpp"
#include "nccl_ranks.hpp"
#include "support/scoped_environment.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kSum = ReduceOp::kSum;

/// Holds a stream back until it is opened.
class Gate {
 public:
  explicit Gate(StreamHandle stream) {
    HostStreams::enqueue(stream, [opened = opened_.get_future().share()] { opened.wait(); });
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

bool is_alive(const c10::weak_intrusive_ptr<c10::StorageImpl>& memory) { return memory.use_count() > 0; }

c10::weak_intrusive_ptr<c10::StorageImpl> weak_memory(const at::Tensor& tensor) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl());
}

}  // namespace

TEST_CASE("a batch is one launch, and nothing is launched for nothing", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [](NcclRank& rank) {
    const std::vector<at::Tensor> pieces = {at::ones({3}), at::zeros({0}), at::ones({2}, at::kBFloat16)};
    const std::vector<at::Tensor> wholes = {at::ones({6}), at::zeros({0}), at::ones({4}, at::kBFloat16)};
    rank.world->start_all_gather_batch(wholes, pieces, "batch")->wait();
    rank.world->start_reduce_scatter_batch(pieces, wholes, kSum, "batch")->wait();
    all_reduce(*rank.world, at::zeros({0}));
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().launches == 2 * 2);
  CHECK(nccl.counts().collectives == 2 * 2 * 2);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("gathers and reductions have a communicator each, connected when it is used", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  std::vector<int> reducing(2), gathering(2);
  const auto errors = errors_on_nccl(nccl, {.world_size = 1}, [&](NcclRank& rank) {
    all_reduce(*rank.world, at::ones({1}));
    reduce_scatter(*rank.world, at::ones({1}), at::ones({1}));
    reducing[0] = nccl.counts().communicators;
    all_gather(*rank.world, at::ones({1}), at::ones({1}));
    broadcast(*rank.world, at::ones({1}), 0);
    gathering[0] = nccl.counts().communicators;
  });
  CHECK(errors == no_errors(1));
  CHECK(reducing[0] == 1);
  CHECK(gathering[0] == 2);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a scaled sum averages in the collective, in every floating-point dtype", "[comm][nccl_communicator]") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (const int size : {1, 2, 3}) {
      CAPTURE(dtype, size);
      const NcclSubstitute nccl({.polls = 1});
      // The average, which is NCCL's, and a factor of ours.
      const double scale = GENERATE(true, false) ? 1.0 / size : 0.375;
      std::vector<at::Tensor> pieces(size), sums(size);
      const auto values = [&](int rank) { return (at::arange(2 * size, at::kDouble) + 3 * rank).to(dtype); };
      const auto errors = errors_on_nccl(nccl, {.world_size = size}, [&](NcclRank& rank) {
        auto* scaled = scaled_sums_of(*rank.world, {.dtype = dtype, .scale = scale});
        if (scaled == nullptr) throw std::logic_error("it scales no sums");
        const int index = rank.world->rank();
        pieces[index] = at::zeros({2}, dtype);
        sums[index] = values(index);
        const at::Tensor input = values(index);
        scaled->start_scaled_reduce_scatter({&pieces[index], 1}, {&input, 1}, scale, "gradients")->wait();
        scaled->start_scaled_all_reduce(sums[index], scale, "gradients")->wait();
      });
      CHECK(errors == no_errors(size));
      CHECK(nccl.misuses().empty());
      at::Tensor expected = at::zeros({2 * size}, dtype);
      for (int rank = 0; rank < size; ++rank) expected += values(rank) * at::scalar_tensor(scale, dtype);
      for (int rank = 0; rank < size; ++rank) {
        CHECK(at::equal(pieces[rank], expected.narrow(0, 2 * rank, 2)));
        CHECK(at::equal(sums[rank], expected));
      }
    }
}

TEST_CASE("scaled sums pass through what wraps a communicator: written down, late, or left out",
          "[comm][nccl_communicator]") {
  const ScopedEnvironment environment(Variables{{"FSDP_FAKE_REDUCE", "1"}});
  const NcclSubstitute nccl;
  const auto faults = std::make_shared<FaultLog>(/*rank=*/0);
  std::vector<std::vector<std::string>> written(2);
  std::vector<at::Tensor> sums(2), pieces(2);
  std::vector<int> was_early(2);
  int launches = 0;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const int index = rank.world->rank();
    sums[index] = at::full({2}, index + 1.0F);
    pieces[index] = at::zeros({1});
    const auto log = std::make_shared<CallLog>();
    const auto late = with_late_delivery(recording(rank.world, log), {.faults = faults,
                                                                      .max_delay = std::chrono::microseconds(100),
                                                                      .random = std::mt19937_64(index)});
    auto& scaled = *scaled_sums_of(*late, {.scale = 0.5});
    const at::Tensor input = at::full({2}, index + 1.0F);
    const auto sum = scaled.start_scaled_all_reduce(sums[index], 0.5, "sum");
    const auto piece = scaled.start_scaled_reduce_scatter({&pieces[index], 1}, {&input, 1}, 0.5, "piece");
    std::this_thread::sleep_for(20ms);
    was_early[index] = !sums[index].isnan().all().item<bool>() || !pieces[index].isnan().all().item<bool>();
    sum->wait();
    piece->wait();
    written[index] = log->names();
    if (scaled_sums_of(*late, {.dtype = at::kLong, .scale = 0.5}) != nullptr) throw std::logic_error("it scales integers");
    if (index == 0) launches = nccl.counts().launches;
    const auto left_out = with_fake_collectives(rank.world);
    scaled_sums_of(*left_out, {.scale = 0.5})->start_scaled_all_reduce(at::ones({1}), 0.5, "left out")->wait();
    scaled_sums_of(*left_out, {.scale = 0.5})
        ->start_scaled_reduce_scatter({&pieces[index], 1}, {&input, 1}, 0.5, "left out");
  });
  CHECK(errors == no_errors(2));
  CHECK(faults->take().empty());
  CHECK(was_early == std::vector<int>{0, 0});
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(at::equal(sums[rank], at::full({2}, 1.5F)));
    CHECK(written[rank] == std::vector<std::string>{"all_reduce sum", "reduce_scatter piece"});
  }
  CHECK(launches == nccl.counts().launches);
}

TEST_CASE("dtypes without arithmetic are refused by name, before anything is launched", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  for (const auto dtype : {at::kBool, at::kShort, at::kComplexFloat}) {
    const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
      all_reduce(*rank.world, at::zeros({2}).to(dtype), kSum, "sums");
    });
    for (const auto& error : errors)
      CHECK_THAT(error, Catch::StartsWith("all_reduce of 'sums': NCCL has no arithmetic for ") &&
                            Catch::Contains(c10::toString(dtype)));
  }
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    if (scaled_sums_of(*rank.world, {.dtype = at::kLong, .scale = 0.5}) != nullptr) throw std::logic_error("it scales integers");
    dynamic_cast<HasScaledSums&>(*rank.world).start_scaled_all_reduce(at::ones({1}, at::kLong), 0.5, "sums");
  });
  for (const auto& error : errors) CHECK_THAT(error, Catch::Contains("sums of Long cannot be scaled"));
  CHECK(nccl.counts().communicators == 0);
}

TEST_CASE("wait holds back the current stream, not the host", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  std::vector<at::Tensor> seen(2);
  std::vector<int> returned_early(2);  // not bool, whose bits share a word
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const int index = rank.world->rank();
    const auto stream = rank.streams->make_stream(StreamPriority::kNormal);
    const HostStreams::Current current(stream);
    const auto input = at::zeros({3}), output = at::zeros({6});
    seen[index] = at::zeros({6});
    Gate gate(stream);
    // Behind the gate: the collective must start behind this, and what reads its result behind it.
    HostStreams::enqueue(stream, [=] { input.data_ptr<float>()[0] = 10.0F + static_cast<float>(index); });
    const auto work = rank.world->start_all_gather(output, input, "gather");
    work->wait();
    returned_early[index] = !work->is_completed();
    HostStreams::enqueue(stream, [=, to = seen[index]] { std::memcpy(to.data_ptr(), output.data_ptr(), 24); });
    gate.open();
    rank.streams->synchronize(stream);
    if (!work->is_completed()) throw std::logic_error("the stream has waited, yet the collective is not done");
  });
  CHECK(errors == no_errors(2));
  CHECK(returned_early == std::vector<int>{1, 1});
  for (const auto& output : seen) CHECK(at::equal(output, at::tensor({10.F, 0.F, 0.F, 11.F, 0.F, 0.F})));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a collective holds back another communicator's next one without giving up its tensors",
          "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  std::vector<int> held(2), keeps(2);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const int index = rank.world->rank();
    const auto other = rank.world->split(std::vector<int>{0, 1}, "other");
    const auto stream = rank.streams->make_stream(StreamPriority::kNormal);
    const auto beside = rank.streams->make_stream(StreamPriority::kNormal);
    auto input = at::ones({1});
    const auto memory = weak_memory(input);
    Gate gate(stream);
    std::shared_ptr<Work> first, second;
    {
      const HostStreams::Current current(stream);
      first = rank.world->start_all_gather(at::zeros({2}), std::exchange(input, {}), "first");
    }
    {
      const HostStreams::Current current(beside);
      if (!first->hold_back(*other)) throw std::logic_error("it cannot");
      second = other->start_all_gather(at::zeros({2}), at::ones({1}), "second");
    }
    std::this_thread::sleep_for(50ms);
    held[index] = !second->is_completed();
    keeps[index] = is_alive(memory);
    gate.open();
    second->wait();
    first->wait();
    rank.streams->synchronize(beside);
    rank.streams->synchronize(stream);
  });
  CHECK(errors == no_errors(2));
  CHECK(held == std::vector<int>{1, 1});
  CHECK(keeps == std::vector<int>{1, 1});
  CHECK(nccl.misuses().empty());
}

TEST_CASE("what waits on the host cannot be held back by a stream", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const auto host = simulated_network({.world_size = 2});
    const auto work = rank.world->start_all_gather(at::zeros({2}), at::ones({1}), "gather");
    if (work->hold_back(*host)) throw std::logic_error("it said that it can");
    work->wait();
  });
  CHECK(errors == no_errors(2));
}

TEST_CASE("tensors of a Work that was dropped live until the collective is done", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  std::vector<int> alive_before(2), alive_after(2);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const int index = rank.world->rank();
    const auto stream = rank.streams->make_stream(StreamPriority::kNormal);
    auto input = at::ones({100});
    const auto memory = weak_memory(input);
    Gate gate(stream);
    {
      const HostStreams::Current current(stream);
      rank.world->start_all_gather(at::zeros({200}), std::exchange(input, {}), "dropped");
    }
    std::this_thread::sleep_for(50ms);
    alive_before[index] = is_alive(memory);
    gate.open();
    all_gather(*rank.world, at::zeros({2}), at::ones({1}));
    const auto end = std::chrono::steady_clock::now() + patience();
    while (is_alive(memory) && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    alive_after[index] = is_alive(memory);
  });
  CHECK(errors == no_errors(2));
  CHECK(alive_before == std::vector<int>{1, 1});
  CHECK(alive_after == std::vector<int>{0, 0});
}

TEST_CASE("once a stream waits for the Work, its tensors are the caller's alone", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  std::vector<int64_t> uses(2);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const auto stream = rank.streams->make_stream(StreamPriority::kNormal);
    const auto input = at::ones({1}), output = at::zeros({2});
    Gate gate(stream);
    {
      const HostStreams::Current current(stream);
      const auto work = rank.world->start_all_gather(output, input, "gather");
      work->wait();
      uses[rank.world->rank()] = static_cast<int64_t>(input.use_count());
    }
    gate.open();
    rank.streams->synchronize(stream);
  });
  CHECK(errors == no_errors(2));
  CHECK(uses == std::vector<int64_t>{1, 1});
}

TEST_CASE("no event of a captured graph is asked whether it is done", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  std::vector<int> asked(2, -1);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    all_gather(*rank.world, at::zeros({2}), at::ones({1}));
    rank.streams->set_capturing(true);
    const auto work = rank.world->start_all_gather(at::zeros({2}), at::ones({1}), "captured");
    if (!work->is_completed()) throw std::logic_error("the host would wait for what it writes down");
    work->wait();
    std::this_thread::sleep_for(50ms);  // several looks of the watchdog
    rank.streams->set_capturing(false);
    rank.streams->drop_graphs();
    asked[rank.world->rank()] = rank.streams->captured_events_asked();
  });
  CHECK(errors == no_errors(2));
  CHECK(asked == std::vector<int>{0, 0});
}

TEST_CASE("a launch is NCCL's on the caller's thread, and on another where the user has it so", "[comm][nccl_communicator]") {
  for (const int polls : {0, 1}) {
    const NcclSubstitute nccl({.polls = polls});
    const auto errors = errors_on_nccl(nccl, {}, [](NcclRank& rank) {
      for (int i = 0; i < 3; ++i) {
        all_gather(*rank.world, at::zeros({2}), at::ones({1}));
        all_reduce(*rank.world, at::ones({1}));
      }
    });
    CHECK(errors == no_errors(2));
    CHECK(nccl.counts().launches == 2 * 6);
    CHECK(nccl.counts().launch_threads == (polls == 0 ? 0 : 2 * 6));
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("NCCL launches the kernels of two communicators in the host's order, unless the user has said something",
          "[comm][nccl_communicator]") {
  const auto order = [](const Variables& variables, int version) -> std::string {
    const ScopedEnvironment environment(variables);
    const NcclSubstitute nccl({.version = version});
    CHECK(errors_on_nccl(nccl, {.world_size = 1}, [](NcclRank&) {}) == no_errors(1));
    const char* value = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    return value == nullptr ? "unset" : value;
  };
  ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  CHECK(order({}, 22505) == "unset");  // knows no such variable
  CHECK(order({{"NCCL_LAUNCH_ORDER_IMPLICIT", "0"}}, 22809) == "0");
  CHECK(order({}, 22809) == "1");
}

TEST_CASE("a tensor on another device than the group's is refused, also one of the same kind", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 1}, [](NcclRank& rank) {
    rank.world->start_all_reduce(at::zeros({2}, at::kMeta), ReduceOp::kSum, "elsewhere");
  });
  CHECK_THAT(errors[0], Catch::Contains("must be on cpu") && Catch::Contains("found meta"));
}

TEST_CASE("wrong arguments are refused before anything is launched", "[comm][nccl_communicator]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [](NcclRank& rank) {
    rank.world->start_all_gather(at::zeros({3}), at::zeros({1}), "shape");
  });
  for (const auto& error : errors)
    CHECK_THAT(error, Catch::Contains("all_gather of 'shape'") && Catch::Contains("found 3"));
  CHECK(nccl.counts().launches == 0);
}

}  // namespace fsdp::test
