#include "schedule/group_states.hpp"

#include <algorithm>
#include <utility>

namespace fsdp {

int GroupStates::add(GroupFacts facts) {
  const int group = static_cast<int>(groups_.size());
  groups_.emplace_back();
  set_facts(group, std::move(facts));
  return group;
}

void GroupStates::remove(int group) {
  enter(group, Residency::kReleased);
  (*this)[group] = {.facts = {.is_never_released = true, .reduce = {.ranks = -1}}, .residency = Residency::kUnsharded};
}

void GroupStates::set_facts(int group, GroupFacts facts) {
  auto& state = (*this)[group];
  if (facts.is_never_released != state.facts.is_never_released) {
    enter(group, Residency::kReleased);
    state.residency = facts.is_never_released ? Residency::kUnsharded : Residency::kReleased;
  } else if (std::ranges::find(held_, group) != held_.end()) {
    held_bytes_ += facts.unsharded_bytes - state.facts.unsharded_bytes;
  }
  state.facts = std::move(facts);
}

bool GroupStates::have_same_ranks() const {
  int ranks = -1;
  for (const auto& state : groups_) {
    const int theirs = state.facts.reduce.ranks;
    if (theirs == -1) continue;
    if (ranks != -1 && theirs != ranks) return false;
    ranks = theirs;
  }
  return true;
}

void GroupStates::set_residency(int group, Residency residency) {
  auto& state = (*this)[group];
  if (state.facts.is_never_released) return;
  enter(group, residency);
  if (residency == Residency::kReleased) state.holds.end(HoldEvent::kBackwardBegins);  // nothing is here ahead of it
}

void GroupStates::enter(int group, Residency residency) {
  auto& state = (*this)[group];
  const bool was_held = state.is_held();
  state.residency = residency;
  if (state.is_held() == was_held || state.facts.is_never_released) return;
  held_bytes_ += was_held ? -state.facts.unsharded_bytes : state.facts.unsharded_bytes;
  if (was_held)
    std::erase(held_, group);
  else
    held_.push_back(group);
}

std::vector<GroupFacts> GroupStates::facts() const {
  std::vector<GroupFacts> facts;
  for (const auto& group : groups_) facts.push_back(group.facts);
  return facts;
}

bool GroupStates::encloses_any(int group, std::span<const int> others) const {
  return std::ranges::any_of(others, [&](int other) { return encloses(group, other); });
}

void GroupStates::unshard(int group, Actions& actions) {
  if (is_held(group)) return;
  enter(group, Residency::kUnsharding);
  actions.push_back({ActionKind::kUnshard, group});
}

void GroupStates::wait_for_unshard(int group, Actions& actions) {
  if (!is_unsharding(group)) return;
  (*this)[group].residency = Residency::kUnsharded;
  actions.push_back({ActionKind::kWaitForUnshard, group});
}

void GroupStates::release(int group, ActionKind kind, Actions& actions) {
  auto& state = (*this)[group];
  if (!state.facts.is_never_released) enter(group, Residency::kReleased);
  state.holds.end(HoldEvent::kReleased);
  actions.push_back({kind, group});
}

}  // namespace fsdp
