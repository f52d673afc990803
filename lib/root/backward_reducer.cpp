#include "root/backward_reducer.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "group/reduce/reduce_call.hpp"

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

bool has_all_gradients(const ParamGroup& group) {
  // Ranks may use different parameters then: no rank may start a reduction because its own are
  // complete, or the order of collectives would depend on the data.
  const auto& gradients = group.gradients();
  return !gradients.options.reduces_unused_params && gradients.store.is_complete(gradients.trainable_count);
}

bool owes_zeros(const ParamGroup& group) {
  const auto& gradients = group.gradients();
  return gradients.options.requires_gradient_sync && gradients.options.reduces_unused_params && gradients.trainable_count > 0;
}

void BackwardReducer::on_last_gradient(ParamGroup& group) {
  {
    const Range range(runner_.comm_ctx().trace, "FSDP::post_backward_reshard", group.identity());
    runner_.tell(GroupEvent::kLastGradient, group);
  }
  auto& reductions = runner_.reductions();
  reductions.launch_behind_backward();
  if (!group.options().reduce.requires_gradient_sync) return;
  // Packed first: then its gradients are gone when the next parameters take their room. But packing waits for the buffers of
  // earlier reductions, and over a communicator of its own the gather need not.
  const bool gathers_first = group.options().reduce.uses_separate_group;
  const auto* gathered = gathers_first ? gather_before_reduce(group) : nullptr;
  auto reduction = pack(group);
  if (!gathers_first) gathered = gather_before_reduce(group);
  // Packing may have run a user's hooks, which may have read parameters.
  const bool is_next = gathered != nullptr && runner_.scheduler().orders().current().follows() &&
                       is_unsharding(gathered->unsharder().state());
  if (!is_next) gathered = nullptr;
  const auto waits = hold_back(reduction, gathered);
  reductions.launch_or_postpone(std::move(reduction), waits,
                                waits == ReductionQueue::Waits::kForUse ? gathered : nullptr);
}

const ParamGroup* BackwardReducer::gather_before_reduce(const ParamGroup& finished) {
  const auto [actions, first] = runner_.scheduler().gather_before_reduce(finished.identity().id);
  runner_.apply(actions);
  return first == -1 ? nullptr : runner_.find(first);
}

namespace {

/// Warns of the first group of a root alone: the same optimizer is behind the others.
void note_reduction(ParamGroup& group, std::span<ParamGroup* const> all) {
  const int limit = group.parts().config.warn_after_reductions;
  if (!group.notes().optimizer().note_reduction(limit)) return;
  const auto has_been_said = [&](ParamGroup* other) { return other != &group && other->notes().optimizer().has_none(limit); };
  if (std::ranges::any_of(all, has_been_said)) return;
  warn_once(fmt::format("'{}': gradients were reduced in {} backwards, but no optimizer has written the parameters. One that "
                        "was built before fully_shard holds the wrong tensors; build it afterwards, or call "
                        "fsdp::adopt(optimizer)",
                        group.params()[0].name(), limit));
}

}  // namespace

ReduceJob BackwardReducer::pack(ParamGroup& group) {
  runner_.reductions().make_room(group);
  group.gradients().store.note_reduced();
  runner_.tell(GroupEvent::kReduced, group);
  note_reduction(group, runner_.groups());
  return ReduceJob(group, runner_.reductions().has_in_turn(group));
}

/// What the reduction's launch is to wait for, on the host; a stream may have been told to wait. Gathers share the network's
/// bandwidth with reductions that have a communicator of their own; in one queue the one goes first that is launched first.
///
/// gathered: in the room that the reduction's group has left; null: nothing.
ReductionQueue::Waits BackwardReducer::hold_back(ReduceJob& reduction, const ParamGroup* gathered) {
  using Waits = ReductionQueue::Waits;
  if (gathered == nullptr || !reduction.group().options().reduce.uses_separate_group) return Waits::kNot;
  // Groups over other ranks may have other bytes there, by which these would come to another order.
  const auto& ranks = reduction.group().identity().mesh_info.shard_group;
  if (std::ranges::any_of(runner_.groups(),
                          [&](const auto* other) { return other->identity().mesh_info.shard_group != ranks; }))
    return Waits::kNot;
  auto& scheduler = runner_.scheduler();
  if (start_ == ReduceScatterStart::kBySize)
    return is_urgent(gathered->identity().id, scheduler.groups(), scheduler.orders().current()) ? Waits::kForUse
                                                                                                : Waits::kNot;
  if (!runner_.reductions().shifts_first()) return Waits::kNot;
  if (start_ == ReduceScatterStart::kFirstAfterNextBackward) return Waits::kForNextBackward;
  return reduction.hold_back_by(*gathered) ? Waits::kNot : Waits::kForUse;
}

namespace {

/// What the backward has left is added up for a later one.
void end_backward(ParamGroup& group) {
  auto& gradients = group.gradients();
  gradients.streams.end_backward(gradients.store);
  if (!gradients.options.requires_gradient_sync) gradients.store.accumulate(gradients.dtypes);
  gradients.store.end_backward();
}

}  // namespace

void BackwardReducer::flush() {
  for (auto* group : runner_.groups()) {
    if ((owes_zeros(*group) && !group->gradients().store.is_reduced()) || has_gradients_to_reduce(*group)) {
      runner_.tell(GroupEvent::kLastGradient, *group);
      runner_.reductions().launch(pack(*group));
    }
    end_backward(*group);
  }
}

void BackwardReducer::leave() {
  for (auto* group : runner_.groups()) end_backward(*group);
}

}  // namespace fsdp
