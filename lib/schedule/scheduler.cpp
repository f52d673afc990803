#include "schedule/scheduler.hpp"

#include <algorithm>
#include <utility>

#include "base/require.hpp"

namespace fsdp {

void Scheduler::remove(int group) {
  groups_.remove(group);
  std::erase(current_, group);
  std::erase(last_used_, group);
}

// --- a step

Actions Scheduler::release_between_steps() {
  Actions actions;
  groups_.release_held(
      [&](int group) {
        const auto& state = groups_[group];
        return state.facts.reshards_after_backward && !state.holds.keep_through(HoldSpan::kBetweenSteps);
      },
      [&](int group) { groups_.reshard(group, actions); });
  return actions;
}

void Scheduler::plan(StepEvent begins) {
  const ResidencyBudget::Options options = {options_.unsharded_byte_budget, options_.prefetch_distance};
  if (budget_.is_current(options, orders_.forward(), orders_.backward())) return;
  const auto refusal = budget_.try_update(options, orders_.forward(), orders_.backward(), groups_.facts());
  require_state(!refusal || begins != StepEvent::kForwardBegins, "{}", refusal.value_or(""));
}

void Scheduler::begin_forward(bool records_autograd) {
  orders_.begin_forward(records_autograd);
  last_used_.clear();
}

std::vector<int> Scheduler::begin_backward(bool is_of_forward) {
  orders_.begin_backward(is_of_forward);
  reduce_order_.begin_backward();
  gathered_before_pack_ = -1;
  last_used_.clear();
  std::vector<int> ahead;
  left_by_forward_.clear();
  for (const int group : groups_.held())
    if (groups_[group].holds.end(HoldEvent::kBackwardBegins))
      ahead.push_back(group);
    else if (follows_plan() && !budget_.keeps_into_backward(group))
      left_by_forward_.push_back(group);
  return ahead;
}

Actions Scheduler::end_step(StepEnd end) {
  for (size_t i = 0; i < groups_.size(); ++i) {
    auto& [facts, residency, holds, reduced_in, read_again_in] = groups_[static_cast<int>(i)];
    holds.end(end == StepEnd::kMoreBackwards ? HoldEvent::kBackwardEnds : HoldEvent::kStepEnds);
    const bool is_kept = !facts.reshards_after_forward && residency == Residency::kUnsharded;
    if (end == StepEnd::kForward && facts.stays_after_evaluation && is_kept) holds.add(Hold::kAfterEvaluation);
  }
  if (end != StepEnd::kMoreBackwards) forget_uses();
  return release_between_steps();
}

Actions Scheduler::abandon() {
  orders_.abandon();
  Actions actions;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const int group = static_cast<int>(i);
    groups_[group].read_again_in = 0;
    groups_[group].holds.end(HoldEvent::kStepEnds);
    groups_.reshard(group, actions);
  }
  forget_uses();
  return actions;
}

void Scheduler::forget_uses() {
  current_.clear();
  left_by_forward_.clear();
  last_used_.clear();
}

// --- operators

/// While they are held, operators that read no others are not noted. Whether they are is not to be seen in the order.
bool Scheduler::is_part_of_last(Groups used) const {
  return std::ranges::all_of(used, [&](int group) { return contains(last_used_, group); });
}

/// Returns whether the pass begins again.
bool Scheduler::note_use(Groups used, Actions& actions) {
  if (is_part_of_last(used)) return false;
  bool has_started_over = false;
  int last = last_used_.empty() ? -1 : last_used_.back();
  for (const int group : used) {
    if (group == last) continue;
    has_started_over |= orders_.use(group, used);
    if (orders_.is_forward()) release_ahead_of_backward(used, actions);
    last = group;
  }
  last_used_.assign(used.begin(), used.end());
  return has_started_over;
}

Actions Scheduler::use(Groups used, Groups written) {
  Actions actions;
  const bool has_started_over = note_use(used, actions);
  current_ = last_used_;
  if (has_started_over) release_for_plan(current_, groups_.held(), actions);
  if (!left_by_forward_.empty()) release_for_plan(current_, std::exchange(left_by_forward_, {}), actions);
  release_unneeded(current_, actions);
  for (const int group : used) {
    auto& state = groups_[group];
    state.holds.end(HoldEvent::kUsed);
    if (orders_.is_backward() && is_reduced(group) && !state.is_held()) state.read_again_in = orders_.backwards();
  }
  for (const int group : written) groups_.reshard(group, actions);
  make_room(current_, /*candidate=*/-1, actions);
  keep_budget(used, current_, actions);
  // A user who allows nothing ahead wants the least memory: then a reduction's buffers do not stay beside the next group's
  // parameters either.
  if (options_.prefetch_distance == 0 && orders_.is_backward()) actions.push_back({ActionKind::kFreeReductionInputs, -1});
  gather(used, {}, actions);
  prefetch(used, actions);
  return actions;
}

Actions Scheduler::read(Groups used, Groups written) {
  Actions actions;
  groups_.release_held(
      [&](int group) {
        return !contains(used, group) && !groups_[group].holds.keep_through(HoldSpan::kBetweenSteps) &&
               !groups_.encloses_any(group, used);
      },
      [&](int group) { groups_.reshard(group, actions); });
  for (const int group : used) groups_[group].holds.end(HoldEvent::kUsed);
  keep_budget(used, used, actions);
  gather(used, written, actions);
  return actions;
}

Actions Scheduler::read_beside(Groups used, Groups written, Reader reader) {
  Actions actions;
  if (reader == Reader::kHook) keep_budget(used, beside_current(used), actions);
  gather(used, written, actions);
  return actions;
}

Actions Scheduler::end_user_hook(Groups before) {
  Actions actions;
  groups_.release_held(
      [&](int group) { return !contains(before, group); }, [&](int group) { groups_.reshard(group, actions); });
  return actions;
}

void Scheduler::gather(Groups used, Groups written, Actions& actions) {
  for (const int group : written) groups_.reshard(group, actions);
  for (const int group : used) groups_.unshard(group, actions);
  for (const int group : used) groups_.wait_for_unshard(group, actions);
}

// --- one group

Actions Scheduler::on(GroupEvent event, int group) {
  Actions actions;
  auto& state = groups_[group];
  switch (event) {
    case GroupEvent::kUserUnshards:
      state.holds.add(Hold::kByUser);
      keep_budget({&group, 1}, beside_current({&group, 1}), actions);
      groups_.unshard(group, actions);
      break;
    case GroupEvent::kUserWaits:
      groups_.wait_for_unshard(group, actions);
      break;
    case GroupEvent::kUserReshards:
      state.holds.end(HoldEvent::kUserReshards);
      groups_.reshard(group, actions);
      break;
    case GroupEvent::kUserLetsGo:
      state.holds.end(HoldEvent::kUserLetsGo);
      break;
    case GroupEvent::kListed:
      on_listed(group, actions);
      break;
    case GroupEvent::kWritten:
      on_written(group, actions);
      break;
    case GroupEvent::kLastGradient:
      on_last_gradient(group, actions);
      break;
    case GroupEvent::kComplete:
      on_complete(group, actions);
      break;
    case GroupEvent::kPacked:
      on_packed(group, actions);
      break;
    case GroupEvent::kReduced:
      state.reduced_in = orders_.backwards();
      break;
  }
  return actions;
}

void Scheduler::on_written(int group, Actions& actions) {
  groups_[group].holds.end(HoldEvent::kBackwardBegins);  // nothing is here ahead of it
  groups_.reshard(group, actions);
}

void Scheduler::on_listed(int group, Actions& actions) {
  if (groups_.is_held(group) || !has_room_ahead(group)) return;
  groups_[group].holds.add(Hold::kListed);
  groups_.unshard(group, actions);
}

// --- reductions

/// Before its gradients are packed, so that parameters, gradients and the packed copy are not all alive at once. One that is
/// read again behind that stays, or it would be gathered twice for what the order shows as one use.
void Scheduler::on_last_gradient(int group, Actions& actions) {
  const auto& [facts, residency, holds, reduced_in, read_again_in] = groups_[group];
  if (facts.reshards_after_backward && !holds.keep_through(HoldSpan::kLastGradient) && !is_used_again(group) &&
      !is_read_again(group))
    groups_.reshard(group, actions);
}

/// Packed first: then its gradients are gone when the next parameters take their room. But packing waits for the buffers of
/// earlier reductions, and over a communicator of its own the gather need not.
void Scheduler::on_complete(int group, Actions& actions) {
  if (groups_[group].facts.reduce.is_apart) gathered_before_pack_ = gather_before_reduce(group, actions);
  actions.push_back({ActionKind::kPack, group});
}

void Scheduler::on_packed(int group, Actions& actions) {
  groups_[group].reduced_in = orders_.backwards();
  const bool gathers_behind = !groups_[group].facts.reduce.is_apart;
  int gathered = gathers_behind ? gather_before_reduce(group, actions) : std::exchange(gathered_before_pack_, -1);
  // Packing may have run a user's hooks, which may have read parameters.
  if (gathered != -1 && (!orders_.current().follows() || !groups_.is_unsharding(gathered))) gathered = -1;
  switch (reduce_order_.on_packed(group, gathered, options_.reduce_scatter_start, groups_, orders_.current())) {
    case ReduceStart::kNow:
      actions.push_back({ActionKind::kStartReduction, -1});
      break;
    case ReduceStart::kBehindGather:
      actions.push_back({ActionKind::kStartBehindGather, gathered});
      break;
    case ReduceStart::kWaits:
      break;
  }
}

/// `group` has its last gradient and may have been released: what the next use would gather first thing, in the room that it
/// has left. Launched now it does not wait for that group's reduction. Returns the first of them; -1: nothing.
int Scheduler::gather_before_reduce(int group, Actions& actions) {
  // Else the room is not free yet, or not for long.
  const bool has_left = !groups_.is_held(group) && !is_read_again(group) && current_.size() == 1 && current_.front() == group;
  if (!has_left || options_.prefetch_distance == 0 || !orders_.current().follows()) return -1;
  const auto& upcoming = orders_.current().upcoming(1);
  // A list says what that one is to gather ahead, and when.
  if (upcoming.empty() || groups_[upcoming.front()].facts.has_backward_list) return -1;
  const int next = upcoming.front();
  int first = -1;
  if (!groups_.is_held(next)) {
    if (!groups_[next].facts.prefetches_in_backward || !make_room({}, next, actions)) return -1;
    groups_.unshard(next, actions);
    first = next;
  }
  const int behind = prefetch_upcoming({&next, 1}, actions);
  return first != -1 ? first : behind;
}

}  // namespace fsdp
