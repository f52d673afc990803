#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "group/reduce/reduce_job.hpp"
#include "group/reduce/user_hooks.hpp"
#include "root/root_mutex.hpp"

namespace fsdp {

struct CommContext;

/// The reductions of one root, from packing until their gradients are assigned, oldest first. A packed one may wait for
/// its launch; those behind it wait with it, so that all ranks launch them in the order of packing.
///
/// Not thread-safe: the root's lock guards it.
class ReductionQueue {
 public:
  /// mutex: the root's. hooks: who is told of users' hooks on gradients. All outlive this.
  ReductionQueue(RootMutex& mutex, CommContext& comm_ctx, UserHooks& hooks)
      : mutex_(mutex), comm_ctx_(comm_ctx), hooks_(hooks) {}

  bool is_empty() const { return under_way_.empty(); }
  /// One of this group's is under way that does its part when its turn comes, on the current stream.
  bool has_in_turn(const ParamGroup& group) const;

  /// For one more of the group's, which is to be packed: finishes what is too much.
  void make_room(const ParamGroup& group);
  void launch(ReduceJob reduction);

  /// What a packed reduction's launch waits for.
  enum class Waits { kNot, kForUse, kForNextBackward };
  /// until: the group whose use it waits for; null unless kForUse.
  void launch_or_postpone(ReduceJob reduction, Waits waits, const ParamGroup* until);
  /// Those that have waited for the use of `used`, and those behind them that wait for nothing else.
  void launch_behind_use(std::span<ParamGroup* const> used);
  /// The backward of another group is over: those that have waited for it.
  void launch_behind_backward();
  void launch_postponed();

  /// In a backward the first call gives true.
  bool shifts_first() { return !std::exchange(has_shifted_, true); }
  void begin_backward() { has_shifted_ = false; }

  /// Waits for all reduce-scatters: what was packed is freed.
  void free_inputs();
  /// Waits for all of it: gradients are assigned.
  void finish();
  /// Of one group; null: all of them. The current stream goes on behind what they have queued, as their memory is free
  /// then.
  void drop(const ParamGroup* of);

  /// Counts packed gradients of these together from now on.
  static void share(std::span<const std::shared_ptr<ReductionQueue>> queues);

 private:
  using Sharers = std::vector<std::weak_ptr<ReductionQueue>>;
  struct Postponed {
    ReduceJob reduction;
    Waits waits;              // kNot: but for those before it
    const ParamGroup* until;  // whose use it waits for
    c10::Stream stream;       // that it was packed on
  };

  size_t inputs() const;
  bool free_oldest_input();
  void launch_oldest_postponed();

  RootMutex& mutex_;
  CommContext& comm_ctx_;
  UserHooks& hooks_;
  std::vector<ReduceJob> under_way_;
  std::deque<Postponed> postponed_;
  bool has_shifted_ = false;
  std::shared_ptr<Sharers> sharers_;  // this one among them; null: this one alone
};

}  // namespace fsdp
