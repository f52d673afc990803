#pragma once

#include <functional>

#include "fsdp/simulated_network.hpp"

namespace fsdp::bench {

/// A network that one device simulates: its collectives occupy a stream, beside which it computes.
struct StreamLink {
  SimulatedNetwork network;  ///< for how long they take; its clock is not asked, its log gets no times
  c10::Device device;        ///< tensors are there
  /// Occupies the device's current stream for so many microseconds.
  std::function<void(double us)> spin;
};

/// A communicator over `link`, one of its world's ranks. A collective moves this rank's own bytes, as those of
/// `simulated_network` do, and then takes the time that the same collective takes there alone.
///
/// All groups that are split off share one stream: the link carries one collective after another. It models no two that
/// share the bandwidth, nor other ranks, which would come at other times. A device without streams (the CPU) is
/// occupied before `start_*` returns.
std::shared_ptr<Communicator> stream_link(const StreamLink& link);

}  // namespace fsdp::bench
