// The sanitizer on a device with streams: it stalls them, so that a missing wait shows where the device itself is prompt.
#include <catch2/catch.hpp>

#include <random>
#include <thread>

#include "comm/debug/late_streams.hpp"
#include "comm/debug/stream_stall.hpp"
#include "fsdp/error.hpp"
#include "late_ranks.hpp"
#include "late_streams.hpp"
#include "late_training.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;

std::atomic<int> stalls = 0;
const std::vector<std::string> kNoFaults = {};

void stall_late_stream(c10::Stream stream, std::chrono::microseconds duration) {
  ++stalls;
  HostStreams::enqueue(handle_of(stream), [duration] { std::this_thread::sleep_for(duration); });
}

/// The sanitizer compares parameters with what they should hold, for which the host waits.
LateTraining sanitized(uint64_t seed) {
  return {.steps = 3,
          .options = {.sanitizer = SanitizerOptions{.seed = seed, .max_delay = 2000us}},
          .waits_in_steps = true};
}

struct Stalling {
  Stalling() { set_stream_stall(kLate, &stall_late_stream); }
  ~Stalling() { set_stream_stall(kLate, nullptr); }
};

}  // namespace

TEST_CASE("collectives that the sanitizer stalls give the same results", "[late][sanitizer]") {
  const Stalling stalling;
  for (const uint64_t seed : {1, 2}) {
    INFO("seed " << seed);
    stalls = 0;
    CHECK(wrong_on_late(sanitized(seed), {.streams = {.max_delay = 100us}}) == kNoFaults);
    CHECK(stalls > 0);
  }
  auto replicas = sanitized(3);
  replicas.mesh = {2, 2};
  CHECK(wrong_on_late(replicas, {.world_size = 4}) == kNoFaults);
}

TEST_CASE("what is read before the wait for a stalled collective is poison, and behind it the result", "[late][sanitizer]") {
  const Stalling stalling;
  std::atomic<int> early = 0;
  auto errors = errors_on_late({}, [&](LateRank& rank) {
    const auto late = with_late_streams(rank.world, 20ms, std::mt19937_64(7));
    for (int i = 0; i < 8; ++i) {
      const auto input = at::full({64}, 1.0 + i, at::TensorOptions(rank.device()));
      const auto gathered = at::empty({2 * 64}, input.options());
      const auto reduced = at::empty({32}, input.options());
      const auto gather = late->start_all_gather(gathered, input, "test");
      const auto reduce = late->start_reduce_scatter(reduced, input, ReduceOp::kSum, "test");
      const auto early_gathered = gathered.clone(), early_reduced = reduced.clone();
      gather->wait();
      reduce->wait();
      const auto now_gathered = gathered.clone(), now_reduced = reduced.clone();
      early += early_gathered.isnan().any().item<bool>() + early_reduced.isnan().any().item<bool>();
      if (!now_gathered.eq(1.0 + i).all().item<bool>()) throw UsageError("another gathered value");
      if (!now_reduced.eq(2 * (1.0 + i)).all().item<bool>()) throw UsageError("another sum");
    }
  });
  std::erase(errors, "");
  CHECK(errors == kNoFaults);
  CHECK(early > 8);
}

}  // namespace fsdp::test
