#include <algorithm>

#include "schedule/scheduler.hpp"

// What stays, what there is room for, and what is gathered ahead.
namespace fsdp {

// --- what is released

bool Scheduler::is_used_again(int group) const {
  const auto& order = orders_.current();
  return order.follows() && order.distance_to_next_use(group).has_value();
}

/// By its options, which the plan knows: a group is there for nothing behind its last use in backward.
bool Scheduler::is_told_to_stay(int group) const {
  const auto& facts = groups_[group].facts;
  if (follows_plan()) [[unlikely]] {
    if (!facts.reshards_after_backward)  // its room is taken for good
      return orders_.is_backward() || facts.is_after_forward_unset || !facts.reshards_after_forward;
    return !facts.is_after_forward_unset && !facts.reshards_after_forward && (orders_.is_forward() || is_used_again(group));
  }
  if (!orders_.is_backward()) return !facts.reshards_after_forward;
  return !facts.reshards_after_backward || (!facts.reshards_after_forward && !is_reduced(group));
}

bool Scheduler::is_kept_on_purpose(int group) const {
  return groups_[group].holds.keep_through(HoldSpan::kMakingRoom) || is_told_to_stay(group);
}

bool Scheduler::follows_plan() const {
  return budget_.has_plan() && !orders_.is_inference() && orders_.current().follows();
}

/// Until its first use in this pass, whatever is here was gathered, or kept, for that use; so was what nobody has
/// waited for yet.
bool Scheduler::is_kept_by_plan(int group) const {
  const auto last = orders_.current().last_use(group);
  if (!last || groups_.is_unsharding(group)) return is_used_again(group);
  return orders_.is_forward() ? budget_.keeps_after_forward_use(*last) : budget_.keeps_after_backward_use(*last);
}

bool Scheduler::is_needed(int group, Groups used) const {
  if (contains(used, group) || groups_[group].holds.keep_through(HoldSpan::kRestOfPass) || is_kept_on_purpose(group))
    return true;
  if (follows_plan()) return is_kept_by_plan(group);
  if (orders_.current().follows()) return is_used_again(group);
  // The order is not known (any more): keep what a module around this one may still need.
  return groups_.encloses_any(group, used);
}

void Scheduler::release(int group, Actions& actions) {
  if (orders_.is_forward())
    groups_.reshard_after_forward(group, actions);
  else
    groups_.reshard(group, actions);
}

void Scheduler::release_unneeded(Groups used, Actions& actions) {
  groups_.release_held(
      [&](int group) { return !is_needed(group, used); }, [&](int group) { release(group, actions); });
}

/// The forward goes on where it ended the last time.
void Scheduler::release_ahead_of_backward(Groups used, Actions& actions) {
  groups_.release_held(
      [&](int group) { return groups_[group].holds.end(HoldEvent::kForwardGoesOn) && !contains(used, group); },
      [&](int group) { release(group, actions); });
}

/// A pass begins, or begins again, and `left` are here that the plan does not have then: they would come on top.
void Scheduler::release_for_plan(Groups used, std::vector<int> left, Actions& actions) {
  if (!follows_plan()) return;
  for (const int group : left)
    if (groups_.is_held(group) && !contains(used, group) && !is_kept_on_purpose(group)) release(group, actions);
}

/// For what is used now, and for `candidate` (-1: none). False: there is none for that.
bool Scheduler::make_room(Groups used, int candidate, Actions& actions) {
  // What the budget has no room for is gathered when it is used, with or without a plan.
  const auto& budget = options_.unsharded_byte_budget;
  if (candidate != -1 && budget && groups_.held_bytes() + groups_[candidate].facts.unsharded_bytes > *budget) return false;
  const auto& order = orders_.current();
  if (!order.follows() || follows_plan()) return true;  // what is not needed at once has been released already
  const size_t limit = static_cast<size_t>(std::max(2, 1 + options_.prefetch_distance));
  const size_t wanted = candidate != -1 ? 2 : 1;
  while (groups_.held().size() + wanted > limit) {
    const auto others = others_than(used, Spares::kEnclosing);
    if (others.count + wanted <= limit || others.count == 0) return true;
    // Belady's rule; the candidate itself may be the one that is used last.
    if (candidate != -1 && distance_to(candidate) >= others.distance) return false;
    release(others.farthest, actions);
  }
  return true;
}

/// Whatever else would stay. A plan has room for all that its step shows, and no options that have none. But a step may go
/// another way, and without a known order there is no plan: then what is told to stay is gathered again when it is used.
void Scheduler::keep_budget(Groups gathered, Groups used, Actions& actions) {
  if (!options_.unsharded_byte_budget) return;
  int64_t more = 0;
  for (const int group : gathered)
    if (!groups_.is_held(group)) more += groups_[group].facts.unsharded_bytes;
  while (more > 0 && groups_.held_bytes() + more > *options_.unsharded_byte_budget) {
    auto others = others_than(used, Spares::kOnPurpose);
    if (others.count == 0) others = others_than(used, Spares::kUnsharded);
    if (others.count == 0) return;
    release(others.farthest, actions);
  }
}

/// For what a list says: also for all that is used before it, which would have to wait, or to take its room again.
bool Scheduler::has_room_ahead(int group) const {
  const auto& budget = options_.unsharded_byte_budget;
  if (!budget) return true;
  int64_t bytes = groups_.held_bytes() + groups_[group].facts.unsharded_bytes;
  const auto& order = orders_.current();
  if (!order.follows()) return bytes <= *budget;
  for (const int next : order.upcoming(groups_.size())) {
    if (next == group) return bytes <= *budget;
    if (!groups_.is_held(next)) bytes += groups_[next].facts.unsharded_bytes;
  }
  return false;  // this pass does not use it
}

/// Good until it is asked again.
Scheduler::Groups Scheduler::beside_current(Groups used) {
  beside_current_ = current_;
  beside_current_.insert(beside_current_.end(), used.begin(), used.end());
  return beside_current_;
}

Scheduler::Others Scheduler::others_than(Groups used, Spares spares) const {
  Others others;
  for (const int group : groups_.held()) {
    if (contains(used, group) || groups_[group].holds.has(Hold::kByUser)) continue;
    if (spares != Spares::kUnsharded && is_kept_on_purpose(group)) continue;
    if (spares == Spares::kEnclosing && groups_.encloses_any(group, used)) continue;
    const size_t distance = distance_to(group);
    if (others.count++ == 0 || distance > others.distance) {
      others.farthest = group;
      others.distance = distance;
    }
  }
  return others;
}

size_t Scheduler::distance_to(int group) const {
  const auto& order = orders_.current();
  return order.follows() ? order.distance_to_next_use(group).value_or(SIZE_MAX) : SIZE_MAX;
}

// --- what is gathered ahead

void Scheduler::prefetch(Groups used, Actions& actions) {
  bool has_list = false;
  for (const int group : used) {
    const auto& facts = groups_[group].facts;
    if (!(orders_.is_backward() ? facts.has_backward_list : facts.has_forward_list)) continue;
    has_list = true;
    actions.push_back({ActionKind::kPrefetchListed, group});
  }
  if (!has_list) prefetch_upcoming(used, actions);
}

/// Returns the first that it gathers; -1: nothing.
int Scheduler::prefetch_upcoming(Groups used, Actions& actions) {
  if (options_.prefetch_distance == 0 || !orders_.current().follows()) return -1;
  const auto distance = static_cast<size_t>(options_.prefetch_distance);
  size_t started = 0;
  int first = -1;
  // Behind those that are here already, too. Under a budget that takes no more than a plan may: each group between
  // this use and the gathered one's is here and takes nothing more, and the budget has room for it.
  const auto& upcoming = orders_.current().upcoming(distance + groups_.held().size());
  if (upcoming.empty()) {
    if (orders_.is_forward() && !orders_.is_inference()) prefetch_for_backward(used, actions);
    return -1;
  }
  for (const int group : upcoming) {
    const auto& facts = groups_[group].facts;
    if (facts.is_never_released || contains(used, group)) continue;
    if (groups_.is_held(group)) {
      started += groups_.is_unsharding(group);
      continue;
    }
    if (started >= distance) return first;
    if (orders_.is_backward() && !facts.prefetches_in_backward) {
      if (options_.unsharded_byte_budget) return first;  // what is behind it could take the room that it will need
      continue;
    }
    if (!make_room(used, group, actions)) return first;
    groups_.unshard(group, actions);
    ++started;
    if (first == -1) first = group;
  }
  return first;
}

/// With the last use of a forward, if a backward came behind so many forwards the last time: the groups that it begins with.
/// One fewer than at other times, as a step's memory is largest here.
void Scheduler::prefetch_for_backward(Groups used, Actions& actions) {
  if (!orders_.has_all_forwards()) return;
  int left = options_.prefetch_distance - 1;
  for (const int group : orders_.backward().learned()) {
    const auto& facts = groups_[group].facts;
    if (!groups_.is_held(group) && !contains(used, group)) {
      if (left == 0 || !facts.prefetches_in_backward || !make_room(used, group, actions)) return;
      groups_.unshard(group, actions);
      groups_[group].holds.add(Hold::kAheadOfBackward);
      --left;
    }
    if (facts.has_backward_list) return;  // the list says what comes behind it
  }
}

}  // namespace fsdp
