#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/simulated_clock.hpp"

namespace fsdp {

/// One collective as a simulated network carried it, in its clock's time.
struct SimulatedTransfer {
  std::string operation;  ///< as in RecordedCall
  std::string subject;
  std::string group;
  int64_t bytes = 0;         ///< of the full (unsharded) buffer
  double alone_us = 0;       ///< what it takes with the network to itself
  int64_t start_ns = 0;      ///< launched
  int64_t begin_ns = 0, end_ns = 0;  ///< under way; 0 until it is done
};

/// Nodes of consecutive ranks. A ring over N of them passes between them in N - 1 of its steps (all-reduce:
/// 2 (N - 1)). A group with M ranks on each node has M ways out of a node.
struct SimulatedNodes {
  int ranks = 0;                  ///< of a node; 0: all ranks are on one
  double latency_us = 0;          ///< per ring step between nodes
  double bandwidth_gb_per_s = 0;  ///< a rank's way out of its node; 0: free
};

/// A network that exists only in time: this process is one rank of a world of any size.
struct SimulatedNetwork {
  int world_size = 8;
  int rank = 0;
  double latency_us = 0;         ///< per ring step, of which a collective over W ranks has W - 1 (all-reduce: 2 (W - 1))
  double bandwidth_gb_per_s = 0;  ///< 10^9 bytes a second and rank; 0: free
  double launch_us = 0;           ///< of every collective, before its first step
  SimulatedNodes nodes = {};      ///< that the network above is within
  std::shared_ptr<SimulatedClock> clock = {};  ///< null: the real one
  /// Receives every collective when it is waited for. Null: nobody asks.
  std::shared_ptr<std::vector<SimulatedTransfer>> log = {};
  /// Copy this rank's own bytes to where they belong (its piece of an all-gather, its piece of a
  /// reduce-scatter times one). Off: results are whatever the buffers held, for host-cost studies.
  bool moves_own_bytes = true;
  bool launches_batches = true;
  int64_t packs_below = 0;  ///< see Communicator::packs_below
};

/// A communicator over `network`. Collectives on one communicator follow each other, as on a
/// stream; those of groups that are split off go on beside them and share the bandwidth equally, within nodes
/// and between them. `Work::wait` returns when the modelled time has passed. Ring cost model: a collective
/// of B bytes a rank takes launch + (W - 1) * (latency + B / W / bandwidth) for B the size of the full buffer.
std::shared_ptr<Communicator> simulated_network(const SimulatedNetwork& network);

/// One collective as `recording` saw it.
struct RecordedCall {
  std::string operation;  ///< "all_gather", "reduce_scatter", "all_reduce", "broadcast"
  std::string subject;
  std::string group;
  int64_t bytes = 0;   ///< of the full (unsharded) buffer
  int tensors = 1;     ///< more than one in a batched launch
};

struct CallLog {
  std::vector<RecordedCall> calls;
  /// "operation subject" for each call, which is what most tests compare.
  std::vector<std::string> names() const;
  void clear() { calls.clear(); }
};

/// Forwards to `inner` and writes every collective, at its start, into `log`. Groups that are split
/// off record into the same log.
std::shared_ptr<Communicator> recording(std::shared_ptr<Communicator> inner,
                                        std::shared_ptr<CallLog> log);

}  // namespace fsdp
