#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>

#include "base/fault_log.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// When collectives are seen to be done, and where faults go.
struct LateDelivery {
  std::shared_ptr<FaultLog> faults;
  std::chrono::microseconds max_delay;
  std::mt19937_64 random;
};

/// Draws the delay of the next collective: half of them take none, the others up to `most`.
std::chrono::microseconds draw_delay(std::mt19937_64& random, std::chrono::microseconds most);

/// Wraps `inner` so that results arrive only with the wait for them, after a random delay: half of the collectives take none,
/// the others up to the most. Until then outputs are poison. The collective itself works on memory of its own; inputs of
/// gathers are sent from where they are.
///
/// A change to an input between launch and wait, or to an output, is a fault. Broadcasts are as they were.
/// Groups that are split off are not late. `inner` lives as long as this.
std::shared_ptr<Communicator> with_late_delivery(std::shared_ptr<Communicator> inner, LateDelivery how);

}  // namespace fsdp
