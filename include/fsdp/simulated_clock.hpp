#pragma once

#include <cstdint>
#include <memory>

#include "fsdp/api.hpp"

namespace fsdp {

/// The time of simulated networks and of what computes beside them, in nanoseconds. Only real_clock's is thread-safe.
class FSDP_API SimulatedClock {
 public:
  virtual ~SimulatedClock() = default;
  /// Nanoseconds since a fixed moment. It never goes back.
  virtual int64_t now_ns() const = 0;
  /// Returns when `now_ns()` is `time_ns` or more.
  virtual void wait_until(int64_t time_ns) = 0;
};

/// The machine's steady clock.
FSDP_API std::shared_ptr<SimulatedClock> real_clock();

/// A clock that starts at 0 and moves only by wait_until, which returns at once. Work of the host takes no time on it, so a
/// thread that computes by waiting, with the collectives that it waits for, takes exactly the modelled time.
FSDP_API std::shared_ptr<SimulatedClock> virtual_clock();

}  // namespace fsdp
