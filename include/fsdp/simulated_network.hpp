#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/simulated_clock.hpp"

namespace fsdp {

/// One collective of a simulated network, in the time of its clock.
struct FSDP_API SimulatedTransfer {
  std::string operation;  ///< "all_gather", "reduce_scatter", "all_reduce" or "broadcast"
  std::string subject;
  std::string group;
  int64_t bytes = 0;         ///< of the full (unsharded) buffer
  double alone_us = 0;       ///< how long it takes if it has the network to itself
  int64_t start_ns = 0;      ///< when it was launched
  int64_t begin_ns = 0, end_ns = 0;  ///< when its transfer began and ended; 0 until it is done
};

/// Nodes of consecutive ranks. A ring over N nodes passes between nodes in N - 1 of its steps (all-reduce: 2 (N - 1)). A group
/// with M ranks on each node has M connections out of a node.
struct FSDP_API SimulatedNodes {
  int ranks = 0;                  ///< ranks of a node; 0: all ranks are on one node
  double latency_us = 0;          ///< of a ring step between nodes
  double bandwidth_gb_per_s = 0;  ///< 10^9 bytes a second of a rank's connection out of its node; 0: no limit
};

/// A modelled network. This process is one rank of a world of any size; the other ranks do not exist.
struct FSDP_API SimulatedNetwork {
  int world_size = 8;
  int rank = 0;
  double latency_us = 0;         ///< of a ring step; a collective over W ranks has W - 1 of them (all-reduce: 2 (W - 1))
  double bandwidth_gb_per_s = 0;  ///< 10^9 bytes a second and rank; 0: no limit
  double launch_us = 0;           ///< of every collective, before its first step
  SimulatedNodes nodes = {};      ///< the network above is the one within a node
  std::shared_ptr<SimulatedClock> clock = {};  ///< default: real_clock()
  /// If set, each collective is appended when it is waited for.
  std::shared_ptr<std::vector<SimulatedTransfer>> log = {};
  /// True: this rank's own part of the result is copied: its piece of an all-gather, and its own contribution to a
  /// reduction. False: nothing is copied, and results are undefined, for measurements of host time.
  bool moves_own_bytes = true;
  bool launches_batches = true;
  int64_t packs_below = 0;  ///< Communicator::packs_below
};

/// A communicator over `network`. Collectives of one communicator run one after another, as on a stream. Those of groups that
/// are split off run at the same time and share the bandwidth equally, within nodes and between them. `Work::wait` returns
/// when the modelled time has passed.
///
/// Cost of a ring: a collective over W ranks with a full buffer of B bytes takes launch + (W - 1) * (latency + B / W /
/// bandwidth); an all-reduce has 2 (W - 1) such steps.
FSDP_API std::shared_ptr<Communicator> simulated_network(const SimulatedNetwork& network);

}  // namespace fsdp
