#pragma once

#include <cstdint>
#include <memory>

namespace fsdp {

/// The time that simulated networks, and what computes beside them, live in. Not thread-safe, but for the real one.
class SimulatedClock {
 public:
  virtual ~SimulatedClock() = default;
  /// Nanoseconds since some moment; never less than before.
  virtual int64_t now_ns() const = 0;
  /// Returns when `now_ns()` is `time_ns` or more.
  virtual void wait_until(int64_t time_ns) = 0;
};

/// The machine's steady clock.
std::shared_ptr<SimulatedClock> real_clock();

/// Begins at 0 and moves only when somebody waits, at once: what the host itself does takes no time. One thread
/// that computes by waiting, and collectives that it waits for, then pass exactly the time that is modelled.
std::shared_ptr<SimulatedClock> virtual_clock();

}  // namespace fsdp
