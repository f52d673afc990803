// The sanitizer on a device with streams: it stalls them, so that a missing wait shows where the device itself is prompt.
#include <catch2/catch.hpp>

#include <thread>

#include "comm/stream_stall.hpp"
#include "late_streams.hpp"
#include "late_training.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;

std::atomic<int> stalls = 0;

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
    CHECK(wrong_on_late(sanitized(seed), {.streams = {.max_delay = 100us}}).empty());
    CHECK(stalls > 0);
  }
  auto replicas = sanitized(3);
  replicas.mesh = {2, 2};
  CHECK(wrong_on_late(replicas, {.world_size = 4}).empty());
}

TEST_CASE("on a prompt device most waits can be left out unseen, and under the sanitizer they are seen", "[late][sanitizer]") {
  const Stalling stalling;
  const auto noticed = [](const LateTraining& training) {
    int count = 0;
    for (int wait = 30; wait < 60; ++wait) {
      HostStreams::Options streams;
      streams.forgets_wait = wait;
      count += !wrong_on_late(training, {.streams = streams}).empty();
    }
    return count;
  };
  auto plain = sanitized(1);
  plain.options.sanitizer.reset();
  const int without = noticed(plain), with = noticed(sanitized(1));
  CAPTURE(without, with);
  CHECK(with >= without + 5);
}

}  // namespace fsdp::test
