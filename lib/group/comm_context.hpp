#pragma once

#include <vector>

#include "base/side_stream.hpp"
#include "group/gather/gather_slots.hpp"
#include "group/gather/gather_stream.hpp"
#include "group/reduce/gradient_division.hpp"
#include "group/reduce/reduction_slots.hpp"
#include "trace/collective_trace.hpp"
#include "trace/step_meter.hpp"

namespace fsdp {

class ParamGroup;

/// What the groups of one root share when they communicate: streams (Note [Streams of a root]), registered memory, and who
/// is told of it. Its like in FSDP2 is FSDPCommContext; what `share_comm_ctx` shares among roots is less.
///
/// Not thread-safe: the root's lock guards it.
struct CommContext {
  std::vector<ParamGroup*> groups;  ///< these, as the root has them
  GatherStream all_gather_stream;
  SideStream reduce_scatter_stream;
  SideStream post_reduce_stream;  ///< all-reduces, divisions and copies, which the next reduce-scatter does not wait for
  GatherSlots gather_slots;
  ReductionSlots reduction_slots;
  StepMeter meter;
  CollectiveTrace trace{meter};
  Divisor divisor;  ///< of sums of gradients

  void let_current_wait_for_reductions() {
    reduce_scatter_stream.let_current_wait();
    post_reduce_stream.let_current_wait();
  }
  /// All that reductions have queued is behind the current stream's present end.
  void join_reductions() {
    reduce_scatter_stream.join();
    post_reduce_stream.join();
  }
};

}  // namespace fsdp
