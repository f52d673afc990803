#include "group/root_context.hpp"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/require.hpp"
#include "param/residency.hpp"

namespace fsdp {

namespace {
thread_local int user_hooks = 0;  // that run on this thread, of any root

bool contains(std::span<ParamGroup* const> groups, const ParamGroup* group) {
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}
bool encloses_any(const ParamGroup& group, std::span<ParamGroup* const> used) {
  return std::any_of(used.begin(), used.end(),
                     [&](const ParamGroup* inner) { return group.encloses(*inner); });
}
}  // namespace

void RootContext::add(const std::shared_ptr<ParamGroup>& group) {
  std::lock_guard lock(mutex_);
  group->context = shared_from_this();
  group->parts().comm_ctx = &comm_ctx_;
  group->identity().id = static_cast<int>(groups_by_id_.size());
  comm_ctx_.groups.push_back(group.get());
  groups_by_id_.push_back(group.get());
  comm_ctx_.trace.add(group->identity());
  group->mark_between_steps(!in_step());
}

bool RootContext::has_unreleased_groups() const {
  return std::ranges::any_of(groups(), [](const auto* group) { return group->parts().is_never_released(); });
}

/// Into which memory it gathers has to come out the same on all ranks (Note [Which slot]), so it is decided here.
void RootContext::start_unshard(ParamGroup& group) {
  auto& unsharder = group.unsharder();
  if (unsharder.is_held()) return;
  BelowResidency below;
  group.prepare_unshard();
  // Within a step whoever writes the shard on the host waits for gradients first; after a read nobody does.
  unsharder.unshard({.slot = slot_for(group), .may_overlap_copies = in_step()});
  held_.push_back(&group);
}

CommSlot* RootContext::slot_for(ParamGroup& group) {
  if (!group.uses_slots() || group.unsharder().state() == UnshardState::kShardedPostForward) return nullptr;
  try {
    return comm_ctx_.gather_slots.prepare(group, options_.prefetch_distance);
  } catch (...) {
    forget_released();  // the gather of one that had to leave its slot may have failed
    throw;
  }
}

void RootContext::finish_unshard(ParamGroup& group) {
  try {
    group.unsharder().wait_for_unshard();
  } catch (...) {
    forget_released();
    throw;
  }
}

void RootContext::forget_released() {
  std::erase_if(held_, [](const auto* group) { return !group->unsharder().is_held(); });
}

void RootContext::let_go(ParamGroup& group) {
  group.mark_not_ready();
  group.holds.end(HoldEvent::kReleased);
  std::erase(held_, &group);
  group.unsharder().reshard();
}

void RootContext::release(ParamGroup& group) {
  if (!is_forward(step_.state())) return let_go(group);
  const auto& over = group.policy().after_forward.post_forward_group;
  group.mark_not_ready();
  group.unsharder().reshard_after_forward(over && !group.is_stale() ? over : nullptr);  // may find no memory
  group.holds.end(HoldEvent::kReleased);
  std::erase(held_, &group);
}

/// What has been written since it was gathered is gathered again.
void RootContext::follow_writes(std::span<ParamGroup* const> used) {
  for (auto* group : used) {
    if (!group->is_stale()) continue;
    let_go(*group);
    if (group->parts().is_never_released()) group->take_changes();
  }
}

void RootContext::make_readable(std::span<ParamGroup* const> used) {
  for (auto* group : used) start_unshard(*group);
  for (auto* group : used) finish_unshard(*group);
}

void RootContext::touch(std::span<ParamGroup* const> used, const OperatorUse& use) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  comm_ctx_.trace.end_use();
  if (at::in_parallel_region()) {
    // A worker in the middle of somebody's operator: its order is chance, so it decides nothing.
    make_readable(used);
    return;
  }
  if (user_hooks > 0) return read_in_hook(used, use);
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
  const auto held = held_;
  for (auto* group : held)
    if (!contains(used, group) && !group->holds.keep_through(HoldSpan::kBetweenSteps) && !encloses_any(*group, used))
      let_go(*group);
  for (auto* group : used) group->holds.end(HoldEvent::kUsed);
  follow_writes(used);
  make_readable(used);
}

void RootContext::read_in_hook(std::span<ParamGroup* const> used, const OperatorUse& use) {
  if (!in_step()) return read(used, use);  // another root's hook
  follow_writes(used);
  make_readable(used);
}

void RootContext::begin_user_hook() {
  ++user_hooks;
  held_before_hook_ = held_;
}

void RootContext::end_user_hook() noexcept {
  --user_hooks;
  try {
    const auto held = held_;
    for (auto* group : held)
      if (!contains(held_before_hook_, group)) let_go(*group);
  } catch (const std::exception& error) {
    log().error("releasing what a gradient hook has read: {}", error.what());
  }
}

void RootContext::follow_step(std::span<ParamGroup* const> used) {
  for (auto* group : used) {
    if (is_forward(step_.state())) group->check_mode();
    if (group == last_used_) continue;
    const bool has_started_over = order_->use(group->identity().id) == ExecOrder::Progress::kStartedOver;
    if (is_forward(step_.state())) {
      forwards_ += has_started_over;
      release_ahead_of_backward(used);
    }
    if (has_started_over) {
      recheck();
      release_for_plan(used);
    }
    last_used_ = group;
  }
  for (auto* group : current_)
    if (!contains(used, group)) group->mark_not_ready();
  current_.assign(used.begin(), used.end());
  release_unneeded(used);
  for (auto* group : used) {
    group->holds.end(HoldEvent::kUsed);
    if (group->tally.is_reduced && !group->unsharder().is_held()) group->read_after_reduction = backwards_;
  }
  // Written since it was gathered: forward goes on with the new values, as a plain module would.
  if (is_forward(step_.state())) follow_writes(used);
  make_room(used, nullptr);
  // A user who allows nothing ahead wants the least memory: then a reduction's buffers do not stay
  // beside the next group's parameters either.
  if (options_.prefetch_distance == 0 && is_backward(step_.state())) free_reduction_inputs();
  make_readable(used);
  const int64_t task = torch::autograd::get_current_graph_task_id();
  for (auto* group : used) group->mark_ready(task);
  prefetch(used);
  launch_postponed(used);
  comm_ctx_.all_gather_stream.end_wait_for_event();
  comm_ctx_.trace.begin_use(used.front()->identity());
}

bool RootContext::is_used_again(const ParamGroup& group) const {
  return order_->follows() && order_->distance_to_next_use(group.identity().id).has_value();
}

bool RootContext::is_kept_on_purpose(const ParamGroup& group) const {
  if (group.holds.keep_through(HoldSpan::kMakingRoom)) return true;
  const auto& policy = group.policy();
  const bool is_planned = policy.is_after_forward_unset && follows_plan();
  const bool kept_after_forward = !policy.after_forward.reshard && !is_planned;
  if (is_forward(step_.state())) return kept_after_forward;
  return !group.policy().reshard_after_backward || (kept_after_forward && !group.tally.is_reduced);
}

bool RootContext::follows_plan() const {
  return budget_.has_plan() && order_ != &inference_ && order_->follows();
}

/// Until its first use in this pass, whatever is here was gathered, or kept, for that use; so was what nobody has
/// waited for yet.
bool RootContext::is_kept_by_plan(const ParamGroup& group) const {
  const auto last = order_->last_use(group.identity().id);
  if (!last || is_unsharding(group.unsharder().state())) return is_used_again(group);
  return is_forward(step_.state()) ? budget_.keeps_after_forward_use(*last)
                                   : budget_.keeps_after_backward_use(*last);
}

bool RootContext::is_needed(const ParamGroup& group, std::span<ParamGroup* const> used) const {
  if (contains(used, &group) || group.holds.keep_through(HoldSpan::kRestOfPass) || is_kept_on_purpose(group)) return true;
  if (follows_plan()) return is_kept_by_plan(group);
  if (order_->follows()) return is_used_again(group);
  // The order is not known (any more): keep what a module around this one may still need.
  return encloses_any(group, used);
}

void RootContext::release_unneeded(std::span<ParamGroup* const> used) {
  const auto held = held_;
  for (auto* group : held)
    if (!is_needed(*group, used)) release(*group);
}

bool RootContext::counts_for_limit(const ParamGroup& group,
                                   std::span<ParamGroup* const> used) const {
  return !contains(used, &group) && !is_kept_on_purpose(group) && !encloses_any(group, used);
}

bool RootContext::make_room(std::span<ParamGroup* const> used, const ParamGroup* candidate) {
  // What the budget has no room for is gathered when it is used, with or without a plan.
  const auto& budget = options_.unsharded_byte_budget;
  if (candidate != nullptr && budget && comm_ctx_.meter.unsharded_bytes() + candidate->parts().unsharded_bytes() > *budget)
    return false;
  if (!order_->follows() || follows_plan()) return true;  // what is not needed at once has been released already
  const size_t limit = static_cast<size_t>(std::max(2, 1 + options_.prefetch_distance));
  const size_t wanted = 1 + (candidate != nullptr);
  while (true) {
    size_t others = 0, farthest_distance = 0;
    ParamGroup* farthest = nullptr;
    for (auto* group : held_) {
      if (!counts_for_limit(*group, used)) continue;
      ++others;
      const size_t distance = order_->distance_to_next_use(group->identity().id).value_or(SIZE_MAX);
      if (farthest == nullptr || distance > farthest_distance) {
        farthest = group;
        farthest_distance = distance;
      }
    }
    if (others + wanted <= limit || farthest == nullptr) return true;
    // Belady's rule; the candidate itself may be the one that is used last.
    if (candidate != nullptr &&
        order_->distance_to_next_use(candidate->identity().id).value_or(SIZE_MAX) >= farthest_distance)
      return false;
    release(*farthest);
  }
}

void RootContext::prefetch_listed(const std::vector<std::weak_ptr<ParamGroup>>& groups) {
  for (const auto& listed : groups) {
    const auto group = listed.lock();
    if (!group || group->unsharder().is_held()) continue;
    group->holds.add(Hold::kListed);
    if (group->context.get() != this) group->comm_ctx()->trace.look_for_listener();
    group->context->start_unshard(*group);
  }
}

void RootContext::prefetch(std::span<ParamGroup* const> used) {
  const bool backward = is_backward(step_.state());
  bool has_list = false;
  for (auto* group : used) {
    const auto& policy = group->policy();
    const auto& listed = backward ? policy.backward_prefetch : policy.forward_prefetch;
    has_list |= !listed.empty();
    prefetch_listed(listed);
  }
  if (!has_list) prefetch_upcoming(used);
}

/// Returns the first that it gathers; null: nothing.
ParamGroup* RootContext::prefetch_upcoming(std::span<ParamGroup* const> used) {
  if (options_.prefetch_distance == 0 || !order_->follows()) return nullptr;
  const auto distance = static_cast<size_t>(options_.prefetch_distance);
  size_t started = 0;
  ParamGroup* first = nullptr;
  // Behind those that are here already, too. Under a budget that takes no more than a plan may: each group between
  // this use and the gathered one's is here and takes nothing more, and the budget has room for it.
  const auto ids = order_->upcoming(distance + held_.size());
  if (ids.empty() && order_ == &forward_) prefetch_for_backward(used);
  for (const int id : ids) {
    auto* group = find(id);
    if (group == nullptr || group->parts().is_never_released() || contains(used, group)) continue;
    if (group->unsharder().is_held()) {
      started += is_unsharding(group->unsharder().state());
      continue;
    }
    if (started >= distance) return first;
    if (is_backward(step_.state()) && !group->policy().prefetch_in_backward) {
      if (options_.unsharded_byte_budget) return first;  // what is behind it could take the room that it will need
      continue;
    }
    if (!make_room(used, group)) return first;
    start_unshard(*group);
    ++started;
    if (first == nullptr) first = group;
  }
  return first;
}

/// With the last use of a forward, if a backward came behind so many forwards the last time: the groups that it begins with.
/// One fewer than at other times, as a step's memory is largest here.
void RootContext::prefetch_for_backward(std::span<ParamGroup* const> used) {
  if (forwards_ != forwards_before_backward_) return;
  int left = options_.prefetch_distance - 1;
  for (const int id : backward_.learned()) {
    auto* group = find(id);
    if (group == nullptr) continue;
    if (!group->unsharder().is_held() && !group->parts().is_never_released() && !contains(used, group)) {
      if (left == 0 || !group->policy().prefetch_in_backward || !make_room(used, group)) return;
      start_unshard(*group);
      group->holds.add(Hold::kAheadOfBackward);
      --left;
    }
    if (!group->policy().backward_prefetch.empty()) return;  // the list says what comes behind it
  }
}

/// A pass begins again. The plan has it begin with nothing here: what stays from before would come on top.
void RootContext::release_for_plan(std::span<ParamGroup* const> used) {
  if (!follows_plan()) return;
  const auto held = held_;
  for (auto* group : held)
    if (!contains(used, group) && !is_kept_on_purpose(*group)) release(*group);
}

/// The forward goes on where it ended the last time.
void RootContext::release_ahead_of_backward(std::span<ParamGroup* const> used) {
  const auto held = held_;
  for (auto* group : held)
    if (group->holds.end(HoldEvent::kForwardGoesOn) && !contains(used, group)) release(*group);
}

/// Its backward begins. What has been written since it was gathered is gathered again when it is used.
void RootContext::take_over_ahead_of_backward() {
  const auto held = held_;
  for (auto* group : held)
    if (group->holds.end(HoldEvent::kBackwardBegins) && group->is_stale()) let_go(*group);
}

/// What the next use would gather first thing, in the room that the finished group has left: launched now, it does
/// not wait for that group's reduction. Returns the first of them; null: nothing.
ParamGroup* RootContext::prefetch_past(const ParamGroup& finished) {
  // Else the room is not free yet, or not for long.
  const bool is_read_again = finished.read_after_reduction >= learned_in_;
  const bool has_left = !finished.unsharder().is_held() && !is_read_again && current_.size() == 1 && current_.front() == &finished;
  if (!has_left || options_.prefetch_distance == 0 || !order_->follows()) return nullptr;
  const auto ids = order_->upcoming(1);
  auto* next = ids.empty() ? nullptr : find(ids.front());
  // A list says what that one is to gather ahead, and when.
  if (next == nullptr || !next->policy().backward_prefetch.empty()) return nullptr;
  ParamGroup* first = nullptr;
  if (!next->unsharder().is_held() && !next->parts().is_never_released()) {
    if (!next->policy().prefetch_in_backward || !make_room({}, next)) return nullptr;
    start_unshard(*next);
    first = next;
  }
  ParamGroup* const used[] = {next};
  auto* behind = prefetch_upcoming(used);
  return first != nullptr ? first : behind;
}

}  // namespace fsdp
