#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "schedule/action.hpp"
#include "schedule/group_facts.hpp"
#include "schedule/holds.hpp"

namespace fsdp {

inline bool contains(std::span<const int> groups, int group) {
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

/// Where a group's unsharded parameters are, when all actions so far have been done.
enum class Residency : uint8_t {
  kReleased,
  kUnsharding,  ///< their all-gather is under way
  kUnsharded,
};

struct GroupState {
  GroupFacts facts = {};
  Residency residency = Residency::kReleased;
  Holds holds = {};
  /// The last backward that has reduced its gradients, and the last that has used it again after that; 0: none.
  int reduced_in = 0, read_again_in = 0;

  bool is_held() const { return residency != Residency::kReleased; }
  bool is_unsharding() const { return residency == Residency::kUnsharding; }
  /// It is there, and stays so beyond the step: by the user's `unshard`, behind an evaluation, or as backward releases nothing.
  bool is_kept() const {
    return is_held() && (holds.has(Hold::kByUser) || holds.has(Hold::kAfterEvaluation) || !facts.reshards_after_backward);
  }
};

/// What a scheduler knows of each group of its root. Each function that changes where parameters are appends the action
/// that does so.
class GroupStates {
 public:
  /// Returns the group's number: one more than the last one's, whether that is still there or not.
  int add(GroupFacts facts);
  /// It is gone: from now on as one that is never gathered.
  void remove(int group);
  void set_facts(int group, GroupFacts facts);
  /// What has become of it after an action has failed, or by something that no action says.
  void set_residency(int group, Residency residency);

  size_t size() const { return groups_.size(); }
  GroupState& operator[](int group) { return groups_[static_cast<size_t>(group)]; }
  const GroupState& operator[](int group) const { return groups_[static_cast<size_t>(group)]; }
  bool is_held(int group) const { return (*this)[group].is_held(); }
  bool is_unsharding(int group) const { return (*this)[group].is_unsharding(); }
  /// Returns the groups that are unsharded or being gathered and can be released, in the order of their gathers.
  const std::vector<int>& held() const { return held_; }
  int64_t held_bytes() const { return held_bytes_; }  ///< unsharded
  /// Calls `release`, which releases it, for each that is held and that `goes` picks.
  template <class Goes, class Release>
  void release_held(Goes goes, Release release) {
    for (size_t i = 0; i < held_.size();) {
      const int group = held_[i];
      if (goes(group))
        release(group);
      else
        ++i;
    }
  }
  std::vector<GroupFacts> facts() const;
  /// All that are there are cut over the same ranks.
  bool have_same_ranks() const;

  bool encloses(int group, int other) const { return (*this)[group].facts.encloses((*this)[other].facts); }
  bool encloses_any(int group, std::span<const int> others) const;

  /// Unless it is held.
  void unshard(int group, Actions& actions);
  /// Unless it is unsharded.
  void wait_for_unshard(int group, Actions& actions);
  /// Also of a group that is released, which may have kept a piece after forward.
  void reshard(int group, Actions& actions) { release(group, ActionKind::kReshard, actions); }
  void reshard_after_forward(int group, Actions& actions) { release(group, ActionKind::kReshardAfterForward, actions); }

 private:
  void enter(int group, Residency residency);
  void release(int group, ActionKind kind, Actions& actions);

  std::vector<GroupState> groups_;
  std::vector<int> held_;
  int64_t held_bytes_ = 0;
};

}  // namespace fsdp
