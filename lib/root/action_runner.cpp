#include "root/action_runner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "dispatch/residency.hpp"
#include "group/symmetric_memory.hpp"
#include "root/facts_of.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// What is gathered, but not to be used at once.
bool is_prefetch(const Actions& actions, const Action& action) {
  return action.kind == ActionKind::kUnshard && std::ranges::none_of(actions, [&](const Action& other) {
    return other.kind == ActionKind::kWaitForUnshard && other.group == action.group;
  });
}

}  // namespace

void ActionRunner::add(ParamGroup& group) {
  group.parts().comm_ctx = &comm_ctx_;
  group.parts().identity.id = scheduler_.groups().add(facts_of(group));
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
  auto facts = facts_of(group);
  const int id = group.identity().id;
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
    for (const auto& action : actions) {
      std::optional<Range> prefetch;
      if (comm_ctx_.trace.has_listener() && is_prefetch(actions, action)) [[unlikely]]
        prefetch.emplace(comm_ctx_.trace, [&] { return prefetch_name(action.group); });
      execute(action);
    }
  } catch (...) {
    for (const auto* group : comm_ctx_.groups) reconcile(*group);
    throw;
  }
}

void ActionRunner::execute(const Action& action) {
  if (action.kind == ActionKind::kFreeReductionInputs) return reductions_.free_inputs();
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
    case ActionKind::kFreeReductionInputs:
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
