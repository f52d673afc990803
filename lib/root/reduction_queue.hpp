#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "group/reduce/reduce_job.hpp"
#include "group/reduce/user_hooks.hpp"
#include "root/root_mutex.hpp"

namespace fsdp {

struct CommContext;
class ReduceOrder;

/// The reductions of one root, from packing until their gradients are assigned, oldest first. They start in that order; when,
/// is the scheduler's to say (ReduceOrder), but for those that have to make room.
///
/// Not thread-safe: the root's lock guards it.
class ReductionQueue {
 public:
  /// mutex: the root's. order: the scheduler's. hooks: who is told of users' hooks on gradients. All outlive this.
  ReductionQueue(RootMutex& mutex, CommContext& comm_ctx, ReduceOrder& order, UserHooks& hooks)
      : mutex_(mutex), comm_ctx_(comm_ctx), order_(order), hooks_(hooks) {}

  bool is_empty() const { return jobs_.empty(); }

  /// For one more of the group's, which is to be packed: finishes what is too much.
  void make_room(const ParamGroup& group);
  /// Packs the group's gradients, behind `make_room`.
  void pack(ParamGroup& group);
  /// Starts the oldest that has only been packed, as on the stream that packed it. If that throws, it is gone.
  void start_oldest();
  /// Starts the one that was packed last, which the network holds until the gather of `gathered` has arrived. If nothing can
  /// hold it, it is not started, and its group is returned; else null.
  const ParamGroup* start_behind(const ParamGroup& gathered);

  /// Waits for all reduce-scatters: what was packed is freed.
  void free_inputs();
  /// Waits for all of it: gradients are assigned. What has only been packed starts.
  void finish();
  /// Drops the reductions of the group `of`; null: all of them. The current stream goes on behind what they have queued, as
  /// their memory is free then.
  void drop(const ParamGroup* of);

  /// Counts packed gradients of these together from now on.
  static void share(std::span<const std::shared_ptr<ReductionQueue>> queues);

 private:
  using Sharers = std::vector<std::weak_ptr<ReductionQueue>>;

  std::span<ReduceJob> started() { return {jobs_.data(), started_}; }
  size_t inputs() const;
  bool free_oldest_input();

  RootMutex& mutex_;
  CommContext& comm_ctx_;
  ReduceOrder& order_;
  UserHooks& hooks_;
  std::vector<ReduceJob> jobs_;
  size_t started_ = 0;  // the first so many; the others are packed alone
  std::shared_ptr<Sharers> sharers_;  // this one among them; null: this one alone
};

}  // namespace fsdp
