#include "root/action_runner.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.hpp"
#include "dispatch/residency.hpp"
#include "group/reduce/reduce_call.hpp"
#include "group/symmetric_memory.hpp"
#include "root/facts_of.hpp"
#include "root/group_port.hpp"

namespace fsdp {

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

/// What is gathered, but not to be used at once.
bool is_prefetch(const Actions& actions, const Action& action) {
  return action.kind == ActionKind::kUnshard && std::ranges::none_of(actions, [&](const Action& other) {
    return other.kind == ActionKind::kWaitForUnshard && other.group == action.group;
  });
}

}  // namespace

/// A number that all groups of the root over the same ranks have.
int ActionRunner::ranks_of(const ParamGroup& group) {
  for (const auto* other : comm_ctx_.groups)
    if (other->identity().mesh_info.shard_group == group.identity().mesh_info.shard_group)
      return scheduler_.groups()[other->identity().id].facts.reduce.ranks;
  return static_cast<int>(groups_by_id_.size());
}

void ActionRunner::add(ParamGroup& group) {
  group.parts().comm_ctx = &comm_ctx_;
  group.parts().identity.id = scheduler_.groups().add(facts_of(group, ranks_of(group)));
  comm_ctx_.groups.push_back(&group);
  groups_by_id_.push_back(&group);
  comm_ctx_.trace.add(group.identity());
  scheduler_.budget().invalidate();
}

void ActionRunner::remove(ParamGroup& group) {
  const int id = group.identity().id;
  reductions_.drop(&group);  // first: they refer to it
  ready_.drop(group);
  if (scheduler_.groups().is_held(id)) tell(GroupEvent::kWritten, group);
  comm_ctx_.gather_slots.remove(group);
  comm_ctx_.trace.remove(group.identity());
  std::erase(comm_ctx_.groups, &group);
  comm_ctx_.reduction_slots.remove(group);
  scheduler_.remove(id);
  groups_by_id_[static_cast<size_t>(id)] = nullptr;
}

void ActionRunner::facts_changed(const ParamGroup& group) {
  const int id = group.identity().id;
  auto facts = facts_of(group, scheduler_.groups()[id].facts.reduce.ranks);
  if (scheduler_.groups()[id].facts == facts) return;
  scheduler_.groups().set_facts(id, std::move(facts));
  scheduler_.budget().invalidate();
}

bool ActionRunner::has_unreleased_groups() const {
  return std::ranges::any_of(groups(), [](const auto* group) { return group->parts().is_never_released(); });
}

/// As FSDP2 names it.
std::string ActionRunner::prefetch_name(int id) const {
  const auto* group = find(id);
  return fmt::format("FSDP::{}_prefetch for {}", is_backward(step_.state()) ? "backward" : "forward",
                     group ? group->name() : "(gone)");
}

void ActionRunner::apply(const Actions& actions) {
  if (actions.empty()) return;
  try {
    for (const auto& action : actions)
      if (comm_ctx_.trace.has_listener() && is_prefetch(actions, action)) [[unlikely]] {
        const Range prefetch(comm_ctx_.trace, [&] { return prefetch_name(action.group); });
        execute(action);
      } else {
        execute(action);
      }
  } catch (...) {
    for (const auto* group : comm_ctx_.groups) reconcile(*group);
    throw;
  }
}

void ActionRunner::execute(const Action& action) {
  if (action.kind == ActionKind::kFreeReductionInputs) return reductions_.free_inputs();
  if (action.kind == ActionKind::kStartReduction) return reductions_.start_oldest();
  auto* group = find(action.group);
  if (group == nullptr) return;
  switch (action.kind) {
    case ActionKind::kUnshard:
      return unshard_now(*group);
    case ActionKind::kWaitForUnshard:
      return group->unsharder().wait_for_unshard();
    case ActionKind::kReshard:
      return reshard_now(*group, /*after_forward=*/false);
    case ActionKind::kReshardAfterForward:
      return reshard_now(*group, /*after_forward=*/true);
    case ActionKind::kPrefetchListed:
      return prefetch_listed(*group);
    case ActionKind::kPack:
      return pack(*group);
    case ActionKind::kStartBehindGather:
      return start_behind(*group);
    case ActionKind::kFreeReductionInputs:
    case ActionKind::kStartReduction:
      return;
  }
}

/// Into which memory it gathers has to come out the same on all ranks (Note [Which slot]), so it is decided here.
void ActionRunner::unshard_now(ParamGroup& group) {
  BelowResidency below;
  group.unsharder().check_can_unshard();
  // A piece that was kept after forward is made of values from before the write.
  if (group.changes().refresh_before_gather()) group.unsharder().drop_post_forward_piece();
  const bool has_slot = gathers_in_slots(group) && group.unsharder().state() != UnshardState::kShardedPostForward;
  auto* slot =
      has_slot ? comm_ctx_.gather_slots.prepare(group, scheduler_.options().prefetch_distance) : nullptr;
  // Within a step whoever writes the shard on the host waits for gradients first; after a read nobody does.
  group.unsharder().unshard({.slot = slot, .may_overlap_copies = in_step(step_.state())});
  if (has_slot) report_arrivals();
}

void ActionRunner::reshard_now(ParamGroup& group, bool after_forward) {
  ready_.drop(group);
  if (!after_forward) return group.unsharder().reshard();
  const auto& over = group.options().residency.after_forward.post_forward_group;
  group.unsharder().reshard_after_forward(over && !group.changes().is_stale() ? over : nullptr);  // may find no memory
}

void ActionRunner::prefetch_listed(const ParamGroup& group) {
  const auto& policy = group.options().residency;
  for (const auto& weak : is_backward(step_.state()) ? policy.backward_prefetch : policy.forward_prefetch) {
    const auto listed = weak.lock();
    if (!listed || listed->unsharder().is_held()) continue;
    auto& theirs = root_of(*listed).runner();
    if (&theirs != this) theirs.comm_ctx_.trace.look_for_listener();
    theirs.tell(GroupEvent::kListed, *listed);
  }
}

void ActionRunner::on_last_gradient(ParamGroup& group) {
  {
    const Range range(comm_ctx_.trace, "FSDP::post_backward_reshard", group.identity());
    tell(GroupEvent::kLastGradient, group);
  }
  start_reductions(scheduler_.reduce_order().on_next_backward());
  if (group.options().reduce.requires_gradient_sync) tell(GroupEvent::kComplete, group);
}

void ActionRunner::start_reductions(size_t count) {
  for (; count > 0; --count) reductions_.start_oldest();
}

/// May run users' hooks on the gradients of other groups.
void ActionRunner::prepare_pack(ParamGroup& group) {
  reductions_.make_room(group);
  group.gradients().store.note_reduced();
  note_reduction(group, groups());
}

void ActionRunner::pack(ParamGroup& group) {
  prepare_pack(group);
  const BelowResidency below;  // for what follows, too: no hook on a gradient runs in it
  reductions_.pack(group);
  tell(GroupEvent::kPacked, group);
}

void ActionRunner::start_behind(const ParamGroup& gathered) {
  if (const auto* packed = reductions_.start_behind(gathered))
    scheduler_.reduce_order().wait_for_use(packed->identity().id, gathered.identity().id);
}

void ActionRunner::reduce_left() {
  for (auto* group : groups()) {
    if ((owes_zeros(*group) && !group->gradients().store.is_reduced()) || has_gradients_to_reduce(*group)) {
      tell(GroupEvent::kLastGradient, *group);
      prepare_pack(*group);
      tell(GroupEvent::kReduced, *group);
      reductions_.pack(*group);
      reductions_.start_oldest();
    }
    end_backward(group->gradients());
  }
}

/// A group that had to leave its slot has finished its gather. No more than that: where others are, the scheduler knows when
/// the actions behind this one have been done, too.
void ActionRunner::report_arrivals() {
  for (const auto* group : comm_ctx_.groups)
    if (scheduler_.groups().is_unsharding(group->identity().id) && is_unsharded(group->unsharder().state())) reconcile(*group);
}

/// The scheduler learns where the group's parameters are.
void ActionRunner::reconcile(const ParamGroup& group) {
  const auto state = group.unsharder().state();
  scheduler_.groups().set_residency(group.identity().id, is_unsharding(state)  ? Residency::kUnsharding
                                                         : is_unsharded(state) ? Residency::kUnsharded
                                                                               : Residency::kReleased);
}

}  // namespace fsdp
