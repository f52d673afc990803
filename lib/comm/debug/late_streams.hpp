#pragma once

#include <chrono>
#include <memory>
#include <random>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// `inner`, of a device with streams, but collectives begin late, by up to `max_delay` and half of them not at all, as
/// when the network is slow: on a stream of their own, which stalls in front of each. Outputs are poison until then.
/// So what is done to an input too early is sent, and what reads an output without a wait reads NaN. The host never waits.
/// Broadcasts are as they were. Groups that are split off are not late. On a device that nobody can stall only
/// outputs are poisoned.
std::shared_ptr<Communicator> with_late_streams(std::shared_ptr<Communicator> inner,
                                                std::chrono::microseconds max_delay, std::mt19937_64 random);

}  // namespace fsdp
