#include <algorithm>

#include "root/root_context.hpp"

// When reductions begin that have a communicator of their own (ReduceScatterStart). Gathers share the network's bandwidth
// with them; in one queue the one goes first that is launched first.
namespace fsdp {

const char* name_of(ReduceScatterStart start) {
  switch (start) {
    case ReduceScatterStart::kBySize:
      return "by_size";
    case ReduceScatterStart::kFirstAfterAllGather:
      return "first_after_all_gather";
    case ReduceScatterStart::kFirstAfterNextBackward:
      return "first_after_next_backward";
  }
  return "";
}

/// gathered: in the room that the reduction's group has left; null: nothing.
ReductionQueue::Waits RootContext::hold_back(ReduceJob& reduction, const ParamGroup* gathered) {
  using Waits = ReductionQueue::Waits;
  if (gathered == nullptr || !reduction.group().reduction().uses_separate_group) return Waits::kNot;
  // Groups over other ranks may have other bytes there, by which these would come to another order.
  const auto& ranks = reduction.group().identity().mesh_info.shard_group;
  if (std::any_of(comm_ctx_.groups.begin(), comm_ctx_.groups.end(),
                  [&](const auto* other) { return other->identity().mesh_info.shard_group != ranks; }))
    return Waits::kNot;
  if (options_.reduce_scatter_start == ReduceScatterStart::kBySize)
    return is_urgent(gathered->identity().id, scheduler_.groups(), scheduler_.orders().current()) ? Waits::kForUse
                                                                                                  : Waits::kNot;
  if (!reductions_.shifts_first()) return Waits::kNot;
  if (options_.reduce_scatter_start == ReduceScatterStart::kFirstAfterNextBackward) return Waits::kForNextBackward;
  return reduction.hold_back_by(*gathered) ? Waits::kNot : Waits::kForUse;
}

}  // namespace fsdp
