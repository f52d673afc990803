#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "fsdp/reduce_scatter_start.hpp"
#include "schedule/exec_order.hpp"
#include "schedule/group_states.hpp"

namespace fsdp {

/// When a reduction starts whose gradients have been packed.
enum class ReduceStart : uint8_t {
  kNow,
  kBehindGather,  ///< now, but the network and its stream hold it until a gather has arrived
  kWaits,         ///< when ReduceOrder says so
};

/// Decides when packed reductions of one root start. They start in the order of packing, so that all ranks launch the same: one
/// that waits holds back those behind it. The answers are how many start, oldest first.
///
/// Not thread-safe: the root's lock guards it.
class ReduceOrder {
 public:
  void begin_backward() { has_shifted_ = false; }

  /// The group has been packed. gathered: the group that is being gathered in the room that it has left; -1: none. order: of
  /// the backward. Where it answers kBehindGather and nothing can hold the reduction back, `wait_for_use` follows.
  ReduceStart on_packed(int group, int gathered, ReduceScatterStart start, const GroupStates& groups, const ExecOrder& order);
  /// The reduction that was packed last waits for the use of `gathered`.
  void wait_for_use(int group, int gathered) { waiting_.push_back({group, Waits::kForUse, gathered}); }

  /// An operator uses `used`: those start that have waited for it, and those behind them that wait for nothing else.
  size_t on_use(std::span<const int> used);
  /// The backward of another group is over: those start that have waited for it.
  size_t on_next_backward();
  /// The backward is over, and all start.
  size_t all();
  /// The oldest has been started for the sake of its buffers. It may be one that was to start when something failed.
  void note_started() {
    if (!waiting_.empty()) waiting_.pop_front();
  }
  /// The packed gradients of the group are gone, or it is. What has waited for its use waits for nothing of its own.
  void drop(int group);
  void clear() { waiting_.clear(); }

 private:
  enum class Waits : uint8_t { kForOlder, kForUse, kForNextBackward };
  struct Waiting {
    int group;
    Waits waits;
    int until = -1;  // the group whose use it waits for
  };

  Waits wait_of(int group, int gathered, ReduceScatterStart start, const GroupStates& groups, const ExecOrder& order) const;

  std::deque<Waiting> waiting_;
  bool has_shifted_ = false;  // in this backward
};

/// What is computed before the use of `gathered`, which `order` has next or soon, is smaller than that is: so it is likely
/// to be over before the gather. (Bytes are what the schedule knows; times would make ranks differ.)
bool is_urgent(int gathered, const GroupStates& groups, const ExecOrder& order);

}  // namespace fsdp
