
#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "root/facts_of.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

thread_local int user_hooks = 0;  // that run on this thread, of any root

using Ids = c10::SmallVector<int, 8>;

Ids ids_of(std::span<ParamGroup* const> groups) {
  Ids ids;
  for (const auto* group : groups) ids.push_back(group->identity().id);
  return ids;
}

/// Written since they were gathered: these are gathered again. One rank's, which are not, follow at once.
Ids take_writes(std::span<ParamGroup* const> used) {
  Ids written;
  for (auto* group : used) {
    if (!group->is_stale()) continue;
    written.push_back(group->identity().id);
    if (group->parts().is_never_released()) group->refresh();
  }
  return written;
}

}  // namespace

void RootContext::add(const std::shared_ptr<ParamGroup>& group) {
  std::lock_guard lock(mutex_);
  auto& port = GroupPort::of(*group);
  port.set_root(shared_from_this());
  group->parts().comm_ctx = &comm_ctx_;
  comm_ctx_.user_hooks = this;
  group->identity().id = scheduler_.groups().add(facts_of(*group));
  comm_ctx_.groups.push_back(group.get());
  groups_by_id_.push_back(group.get());
  comm_ctx_.trace.add(group->identity());
  port.mark_between_steps(!in_step());
  scheduler_.budget().invalidate();
}

void RootContext::facts_changed(const ParamGroup& group) {
  std::lock_guard lock(mutex_);
  scheduler_.groups().set_facts(group.identity().id, facts_of(group));
  scheduler_.budget().invalidate();
}

bool RootContext::has_unreleased_groups() const {
  return std::ranges::any_of(groups(), [](const auto* group) { return group->parts().is_never_released(); });
}

void RootContext::apply(const Actions& actions) {
  if (actions.empty()) return;
  try {
    for (const auto& action : actions) execute(action);
  } catch (...) {
    report_states();
    throw;
  }
}

void RootContext::execute(const Action& action) {
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
void RootContext::unshard_now(ParamGroup& group) {
  BelowResidency below;
  group.prepare_unshard();
  const bool has_slot = group.uses_slots() && group.unsharder().state() != UnshardState::kShardedPostForward;
  auto* slot =
      has_slot ? comm_ctx_.gather_slots.prepare(group, scheduler_.options().prefetch_distance) : nullptr;
  // Within a step whoever writes the shard on the host waits for gradients first; after a read nobody does.
  group.unsharder().unshard({.slot = slot, .may_overlap_copies = in_step()});
  if (has_slot) report_arrivals();
}

void RootContext::reshard_now(ParamGroup& group, bool after_forward) {
  GroupPort::of(group).mark_not_ready();
  if (!after_forward) return group.unsharder().reshard();
  const auto& over = group.policy().after_forward.post_forward_group;
  group.unsharder().reshard_after_forward(over && !group.is_stale() ? over : nullptr);  // may find no memory
}

void RootContext::prefetch_listed(const ParamGroup& group) {
  const auto& policy = group.policy();
  for (const auto& weak : is_backward(step_.state()) ? policy.backward_prefetch : policy.forward_prefetch) {
    const auto listed = weak.lock();
    if (!listed || listed->unsharder().is_held()) continue;
    auto& root = root_of(*listed);
    if (&root != this) root.comm_ctx_.trace.look_for_listener();
    root.tell(GroupEvent::kListed, *listed);
  }
}

/// A group that had to leave its slot has finished its gather. No more than that: where others are, the scheduler knows when
/// the actions behind this one have been done, too.
void RootContext::report_arrivals() {
  auto& known = scheduler_.groups();
  for (const auto* group : comm_ctx_.groups) {
    const int id = group->identity().id;
    if (known.is_unsharding(id) && is_unsharded(group->unsharder().state()))
      known.set_residency(id, Residency::kUnsharded);
  }
}

void RootContext::report_states() {
  for (const auto* group : comm_ctx_.groups) {
    const auto state = group->unsharder().state();
    scheduler_.groups().set_residency(group->identity().id, is_unsharding(state)  ? Residency::kUnsharding
                                                            : is_unsharded(state) ? Residency::kUnsharded
                                                                                  : Residency::kReleased);
  }
}

void RootContext::touch(std::span<ParamGroup* const> used, const OperatorUse& use) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  comm_ctx_.trace.note_use(nullptr);
  if (at::in_parallel_region()) {
    // A worker in the middle of somebody's operator: its order is chance, so it decides nothing.
    return apply(scheduler_.read_beside(ids_of(used), {}));
  }
  if (user_hooks > 0) return in_step() ? read_beside(used) : read(used, use);  // else it is another root's hook
  enter_phase(torch::autograd::get_current_graph_task_id(), use);
  if (!in_step())
    read(used, use);
  else
    follow_step(used);
}

void RootContext::read(std::span<ParamGroup* const> used, const OperatorUse& use) {
  take_over_modes();
  for (auto* group : used)
    require_state(!group->config().throws_outside_step,
                  "{}: this sharded parameter was read outside a step; use fsdp::forward_scope or "
                  "fsdp::call, or set fault_outside_step to kGather",
                  use.param_name);
  apply(scheduler_.read(ids_of(used), take_writes(used)));
}

void RootContext::read_beside(std::span<ParamGroup* const> used) {
  apply(scheduler_.read_beside(ids_of(used), take_writes(used)));
}

void RootContext::begin_user_hook() {
  ++user_hooks;
  held_before_hook_ = scheduler_.groups().held();
}

void RootContext::end_user_hook() noexcept {
  --user_hooks;
  try {
    apply(scheduler_.end_user_hook(held_before_hook_));
  } catch (const std::exception& error) {
    log().error("releasing what a gradient hook has read: {}", error.what());
  }
}

void RootContext::follow_step(std::span<ParamGroup* const> used) {
  const bool forward = is_forward(step_.state());
  const auto ids = ids_of(used);
  if (forward)
    for (auto* group : used) group->eval_precision().check(group->name());
  const auto noted = scheduler_.note_use(ids);
  apply(noted.actions);
  if (noted.has_started_over) recheck();
  for (const int id : scheduler_.current())
    if (std::ranges::find(ids, id) == ids.end())
      if (auto* group = find(id)) GroupPort::of(*group).mark_not_ready();
  // Written since it was gathered: forward goes on with the new values, as a plain module would.
  const auto written = forward ? take_writes(used) : Ids();
  apply(scheduler_.use(ids, written, noted.has_started_over));
  const int64_t task = torch::autograd::get_current_graph_task_id();
  for (auto* group : used) GroupPort::of(*group).mark_ready(task);
  reductions_.launch_behind_use(used);
  comm_ctx_.all_gather_stream.end_wait_for_event();
  comm_ctx_.trace.note_use(&used.front()->identity());
}

}  // namespace fsdp
