#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp {

/// What the scheduler wants done.
enum class ActionKind : uint8_t {
  kUnshard,              ///< start the group's all-gather
  kWaitForUnshard,       ///< finish it: operators can read the group's parameters then
  kReshard,              ///< release the unsharded parameters, or give up their all-gather
  kReshardAfterForward,  ///< as kReshard, but keep what a gather over fewer ranks needs
  /// Tell the groups of the group's prefetch list, which may be another root's, that they are listed. As that is an event of
  /// its own, no action of another kind comes behind.
  kPrefetchListed,
  kFreeReductionInputs,  ///< of no group: finish what keeps packed gradients alive
  /// Pack the group's gradients for their reduction, which may run users' hooks. Then GroupEvent::kPacked says what follows, so
  /// no action comes behind.
  kPack,
  kStartReduction,  ///< of no group: start the oldest reduction that has only been packed
  /// Start the one that was packed last, held by the network until the gather of `group` has arrived. Where nothing can hold
  /// it, ReduceOrder::wait_for_use.
  kStartBehindGather,
};

struct Action {
  ActionKind kind;
  int group;  ///< -1: none
  bool operator==(const Action&) const = default;
};

/// To be done in this order. Few at a time, and several lists a step for every group: so the first ones cost no allocation.
class Actions {
 public:
  void push_back(const Action& action) {
    if (size_ < first_.size())
      first_[size_] = action;
    else
      spill(action);
    ++size_;
  }
  const Action* begin() const { return all_.empty() ? first_.data() : all_.data(); }
  const Action* end() const { return begin() + size_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  void spill(const Action& action) {
    if (all_.empty()) all_.assign(first_.begin(), first_.end());
    all_.push_back(action);
  }

  std::array<Action, 8> first_;
  size_t size_ = 0;
  std::vector<Action> all_;  // where they are more than `first_` takes
};

}  // namespace fsdp
