#include <catch2/catch.hpp>

#include <spdlog/sinks/base_sink.h>

#include <atomic>
#include <thread>

#include "base/log.hpp"
#include "trace/first_values.hpp"
#include "support/models.hpp"

// Ranks that begin with different values: each keeps a hash of what it has sharded, and they
// compare.

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

const ScheduleCheckOptions kSoon = {.late_after = milliseconds(5000),
                                    .compare_after = milliseconds(20)};

/// The warnings of this kind, on whichever thread.
class Warnings {
  struct Sink final : spdlog::sinks::base_sink<std::mutex> {
    void sink_it_(const spdlog::details::log_msg& message) override {
      const std::string text(message.payload.data(), message.payload.size());
      if (text.find("began with different values") == std::string::npos) return;
      last = text;
      ++count;
    }
    void flush_() override {}
    std::string last;
    std::atomic<int> count{0};
  };

 public:
  Warnings() : sink_(std::make_shared<Sink>()) { log().sinks().push_back(sink_); }
  ~Warnings() { std::erase(log().sinks(), sink_); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;

  int count() const { return sink_->count; }
  /// Once no rank runs.
  const std::string& last() const { return sink_->last; }

 private:
  std::shared_ptr<Sink> sink_;
};

/// The values of this seed. One group.
Chain chain_of(uint64_t seed) {
  return seeded(seed, [] { return Chain(1, 6); });
}

FSDPModule sharded_in_one(Chain& chain, FullyShardOptions options) {
  auto root = fully_shard(chain, options);
  set_schedule_check(root, kSoon);
  return root;
}

void step(Chain& chain, int rank) {
  chain->forward(Inputs(rank, 0).normal({2, 6})).sum().backward();
  chain->zero_grad();
}

/// Steps until there is a warning, or for long, and then enough of them for a second one.
void step_until_warned(Chain& chain, const Rank& rank, const Warnings& warnings) {
  // All ranks take the same number of steps, so none may look for itself.
  bool is_warned = false;
  for (int i = 0; i < 2000 && !is_warned; ++i) {
    step(chain, rank.index());
    std::this_thread::sleep_for(milliseconds(2));
    auto seen = torch::tensor(warnings.count() > 0 ? 1 : 0);
    rank.world()->start_all_reduce(seen, ReduceOp::kMin, "warned")->wait();
    is_warned = seen.item<int64_t>() > 0;
  }
  for (int i = 0; i < 50; ++i) {
    step(chain, rank.index());
    std::this_thread::sleep_for(milliseconds(2));
  }
}

constexpr ThreadRanksOptions kPatient{.timeout = std::chrono::seconds(60)};

}  // namespace

TEST_CASE(
    "ranks that began with different values are warned once, by parameter and with the ways out",
    "[group][first_values]") {
  for (const int ranks : {2, 3}) {
    CAPTURE(ranks);
    Warnings warnings;
    CHECK(on_ranks(
        ranks,
        [&](Rank& rank) {
          auto chain = chain_of(rank.index() == 1 ? 6 : 5);
          sharded_in_one(chain, {.mesh = rank.mesh()});
          step_until_warned(chain, rank, warnings);
          rank.check(true, "no error");
        },
        kPatient));
    CHECK(warnings.count() == 1);
    for (const auto* part : {"'layer0.weight'", "manual_seed", "sync_from_rank0"})
      CHECK_THAT(warnings.last(), Catch::Contains(part));
  }
}

TEST_CASE("what is written before the first step is not compared", "[group][first_values]") {
  Warnings warnings;
  CHECK(on_ranks(
      2,
      [&](Rank& rank) {
        auto chain = chain_of(5 + static_cast<uint64_t>(rank.index()));
        sharded_in_one(chain, {.mesh = rank.mesh()});
        torch::NoGradGuard no_grad;
        sharded(chain->layers[0]->weight).fill_(0.5);
        chain->layers[0]->bias.fill_(0.5);  // through the unsharded parameter
        torch::AutoGradMode grad(true);
        step_until_warned(chain, rank, warnings);
        rank.check(true, "no error");
      },
      kPatient));
  CHECK_THAT(warnings.last(), Catch::Contains("'head.weight'"));
}

TEST_CASE("values that came from rank 0 are not compared", "[group][first_values]") {
  Warnings warnings;
  CHECK(on_ranks(
      2,
      [&](Rank& rank) {
        auto chain = chain_of(5 + static_cast<uint64_t>(rank.index()));
        fully_shard(chain->layers[0], {.mesh = rank.mesh(), .sync_from_rank0 = true});
        sharded_in_one(chain, {.mesh = rank.mesh()});
        step_until_warned(chain, rank, warnings);
        rank.check(true, "no error");
      },
      kPatient));
  CHECK_THAT(warnings.last(), Catch::Contains("'head.weight'"));
}

TEST_CASE("replicas that began with different values are an error on all ranks",
          "[group][first_values]") {
  for (const bool replicates_only : {false, true}) {
    CAPTURE(replicates_only);
    CHECK(on_ranks(
        4,
        [&](Rank& rank) {
          auto chain = chain_of(rank.index() < 2 ? 5 : 6);
          if (replicates_only)
            sharded_in_one(chain, {.mesh = rank.mesh(), .replicate_only = true});
          else
            sharded_in_one(chain, {.mesh = rank.hybrid(2, 2)});
          const auto until = Clock::now() + std::chrono::seconds(60);
          rank.check_throws<ScheduleError>(
              [&] {
                while (Clock::now() < until) {
                  step(chain, rank.index());
                  std::this_thread::sleep_for(milliseconds(2));
                }
              },
              {"replicas of 'layer0.weight'", "manual_seed", "sync_from_rank0"}, "steps");
        },
        kPatient));
  }
}

TEST_CASE(
    "values are compared by elements that are spread over the parameter, in whatever memory it has",
    "[group][first_values]") {
  const auto hash_of = [](const at::Tensor& whole) {
    FirstValues values;
    values.add(whole, 0);
    const FirstValues* const one[] = {&values};
    return FirstValues::hashes_of(one)[0][0];
  };
  const auto values = torch::arange(35, at::kFloat).view({5, 7});
  CHECK(hash_of(values) == hash_of(values.clone()));
  CHECK(hash_of(values) == hash_of(values.t().contiguous().t()));
  CHECK(hash_of(values) != hash_of(values + 1));
  auto last = values.clone();
  last[4][6] = -1;
  CHECK(hash_of(values) != hash_of(last));
  CHECK(hash_of(torch::tensor(1.5)) != hash_of(torch::tensor(2.5)));
  CHECK(hash_of(values.to(at::kBFloat16)) != hash_of((values + 1).to(at::kBFloat16)));
  CHECK_FALSE(hash_of(torch::empty({0, 3})));
  CHECK_FALSE(hash_of(torch::empty({3}, at::TensorOptions().device(at::kMeta))));
}

}  // namespace fsdp::test
