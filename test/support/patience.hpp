#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <mutex>

// How long to wait on this machine, as busy as it is. An order of events is better wherever there is one.
namespace fsdp::test {

/// How many times slower than an idle machine this one was lately, or at its slowest; 1 at least. What it times takes a
/// few milliseconds of a thread of its own time slices, every few seconds.
inline double slowness() {
  using Clock = std::chrono::steady_clock;
  constexpr auto kAgain = std::chrono::seconds(3);
  constexpr double kUsualSeconds = 0.008;
  static std::mutex mutex;
  static Clock::time_point measured;
  static double slowest = 1;
  const std::lock_guard lock(mutex);
  if (measured != Clock::time_point{} && Clock::now() - measured < kAgain) return slowest;
  const auto begin = Clock::now();
  volatile uint64_t hash = 1;
  for (int i = 0; i < 5'000'000; ++i) hash = hash * 6364136223846793005u + 1;
  measured = Clock::now();
  slowest = std::max(slowest, std::chrono::duration<double>(measured - begin).count() / kUsualSeconds);
  return slowest;
}

/// A time that an idle machine would be given, for this one.
inline std::chrono::milliseconds on_this_machine(std::chrono::milliseconds idle) {
  return std::chrono::milliseconds(std::llround(std::ceil(slowness()) * static_cast<double>(idle.count())));
}

/// Longer than what is right takes: what has not happened by then never will.
inline std::chrono::milliseconds patience() { return on_this_machine(std::chrono::seconds(30)); }

/// A timeout that no test reaches whose assertions say `patience`: who waits for it has not been told what it should.
inline std::chrono::milliseconds beyond_patience() { return 4 * patience(); }

}  // namespace fsdp::test
