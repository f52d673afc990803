#include "fsdp/simulated_clock.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace fsdp {
namespace {

class RealClock final : public SimulatedClock {
 public:
  int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  }

  void wait_until(int64_t time_ns) override {
    // Sleeping is late by up to this much, so the last stretch is spun.
    constexpr auto kSpin = std::chrono::microseconds(50);
    const Clock::time_point end{std::chrono::nanoseconds(time_ns)};
    if (Clock::now() + kSpin < end) std::this_thread::sleep_until(end - kSpin);
    while (Clock::now() < end) {
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
};

class VirtualClock final : public SimulatedClock {
 public:
  int64_t now_ns() const override { return now_ns_; }
  void wait_until(int64_t time_ns) override { now_ns_ = std::max(now_ns_, time_ns); }

 private:
  int64_t now_ns_ = 0;
};

}  // namespace

std::shared_ptr<SimulatedClock> real_clock() {
  static const auto clock = std::make_shared<RealClock>();
  return clock;
}

std::shared_ptr<SimulatedClock> virtual_clock() { return std::make_shared<VirtualClock>(); }

}  // namespace fsdp
