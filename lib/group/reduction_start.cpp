#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "group/root_context.hpp"

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

/// What the host is to wait for with its launch; a stream may have been told to wait. gathered: in the room that the
/// reduction's group has left; null: nothing.
RootContext::Waits RootContext::hold_back(GradientReduction& reduction, const ParamGroup* gathered) {
  if (gathered == nullptr || !reduction.group().reduction().uses_separate_group) return Waits::kNot;
  // Groups over other ranks may have other bytes there, by which these would come to another order.
  const auto& ranks = reduction.group().identity().mesh_info.shard_group;
  if (std::any_of(comm_ctx_.groups.begin(), comm_ctx_.groups.end(),
                  [&](const auto* other) { return other->identity().mesh_info.shard_group != ranks; }))
    return Waits::kNot;
  if (options_.reduce_scatter_start == ReduceScatterStart::kBySize)
    return is_urgent(gathered->identity().id, scheduler_.groups(), scheduler_.orders().current()) ? Waits::kForUse : Waits::kNot;
  if (std::exchange(has_shifted_reductions_, true)) return Waits::kNot;
  if (options_.reduce_scatter_start == ReduceScatterStart::kFirstAfterNextBackward) return Waits::kForNextBackward;
  return reduction.hold_back_by(*gathered) ? Waits::kNot : Waits::kForUse;
}

void RootContext::launch_or_postpone(GradientReduction reduction, const ParamGroup* gathered) {
  const auto waits = hold_back(reduction, gathered);
  if (waits == Waits::kNot && postponed_.empty()) return launch(std::move(reduction));
  // Behind one that waits they keep their order.
  const auto device = reduction.group().config().device;
  postponed_.push_back({.reduction = std::move(reduction),
                        .waits = waits,
                        .until = waits == Waits::kForUse ? gathered : nullptr,
                        .stream = current_stream(device)});
}

void RootContext::launch_oldest_postponed() {
  auto oldest = std::move(postponed_.front());
  postponed_.pop_front();
  const c10::StreamGuard stream(oldest.stream);
  launch(std::move(oldest.reduction));
}

/// Those that have waited for this use, and those behind them that wait for nothing else.
void RootContext::launch_postponed(std::span<ParamGroup* const> used) {
  while (!postponed_.empty()) {
    const auto& oldest = postponed_.front();
    if (oldest.waits == Waits::kForNextBackward) return;
    if (oldest.waits == Waits::kForUse && std::find(used.begin(), used.end(), oldest.until) == used.end()) return;
    launch_oldest_postponed();
  }
}

/// The backward of another group is over.
void RootContext::launch_behind_backward() {
  for (auto& postponed : postponed_)
    if (postponed.waits == Waits::kForNextBackward) postponed.waits = Waits::kNot;
  launch_postponed({});
}

void RootContext::launch_all_postponed() {
  while (!postponed_.empty()) launch_oldest_postponed();
}

}  // namespace fsdp
