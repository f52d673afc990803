#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "fsdp/reduce_scatter_start.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "root/reduction_queue.hpp"
#include "root/step_follower.hpp"
#include "schedule/scheduler.hpp"
#include "schedule/step_machine.hpp"

namespace fsdp {

/// One root: its groups, its step, and its lock. Touches that come from the dispatcher and gradients that come from autograd
/// drive it; the scheduler says what is gathered and released with them, and this does it.
///
/// Threads: a root's steps belong to one thread at a time, but operators on several may ask for its groups. So whatever
/// operators, autograd and the controls call takes the lock. What only looks, or hands out a part of the root, does not: it
/// is for the thread that runs the steps, or to be called with the lock held.
class RootContext final : public UserHooks, public std::enable_shared_from_this<RootContext> {
 public:
  struct Options {
    bool is_last_backward = true;
    ReduceScatterStart reduce_scatter_start = ReduceScatterStart::kBySize;
  };

  RootMutex& mutex() { return mutex_; }

  // ===== These take the lock.

  // --- which groups
  /// Takes a group over; in the order of use as far as it is known (depth-first).
  void add(const std::shared_ptr<ParamGroup>& group);
  void remove(ParamGroup& group);
  template <class Value>
  void set_policy(ParamGroup& group, Value GroupPolicy::*option, Value value) {
    std::lock_guard lock(mutex_);
    group.set_policy(option, std::move(value));
    facts_changed(group);
  }
  /// Another layout, dtype or device has come: the scheduler is told.
  void facts_changed(const ParamGroup& group);

  // --- what the dispatcher and autograd report
  /// One operator is about to use `used` (all of this root): they are readable when this returns.
  void touch(std::span<ParamGroup* const> used, const OperatorUse& use);
  void gradient_arrived(ParamGroup& group, size_t index, const at::Tensor& unsharded_param);

  // --- controls
  void unshard(ParamGroup& group);
  void wait_for_unshard(ParamGroup& group);
  void reshard(ParamGroup& group);
  /// The forward that `unshard` was for is over: the group is released as if it had been gathered for that.
  void end_hold(ParamGroup& group);
  void reset_iter_state();
  void enter_scope();
  void leave_scope() noexcept;
  /// Between steps: throws StateError if the sanitizer mode has found something since the last call.
  void throw_faults();

  /// No step may begin until `resume_steps`: the unsharded parameters show other memory for a while. Counts.
  /// Throws StateError, beginning with `caller`, unless `is_quiescent()`.
  void hold_steps(std::string_view caller);
  void resume_steps() noexcept;

  // --- manual finalization of backwards (root_controls.cpp)
  void set_manual_finalization(bool value);
  /// Reduces what is left of the backwards since the last call and ends the step, but for waiting. Returns
  /// the ticket of what is to be waited for; 0: nothing.
  int64_t finalize_backward();
  void wait_for_gradients(int64_t ticket);

  /// Keeps the root alive.
  std::shared_ptr<ReductionQueue> reductions() { return {shared_from_this(), &reductions_}; }

  // ===== These do not: on the thread that runs the steps, or with the lock held.

  Options& options() { return options_; }
  const std::vector<ParamGroup*>& groups() const { return comm_ctx_.groups; }
  const std::vector<ParamGroup*>& groups_by_id() const { return groups_by_id_; }  ///< null where one is gone
  /// True once a step has begun: then the set of groups is fixed (S9).
  bool has_started() const { return has_started_; }

  /// Called at the start of every step, for what only the module tree shows (replaced entries).
  std::function<void()> on_step;
  /// Called before a step or a read begins: groups follow their modules' modes (full_precision_in_eval).
  std::function<void()> follow_modes;
  /// Who shows parameters in a form of its own; may be gone.
  std::weak_ptr<StepFollower> follower;
  /// Between steps calls follow_modes; within one does nothing.
  void take_over_modes();

  bool steps_are_held() const { return step_.is_pinned(); }
  bool is_in_scope() const { return step_.is_in_scope(); }
  bool in_step() const { return fsdp::in_step(step_.state()); }
  /// The time to change what a step relies on, and to look at what it has left: not in a step or a scope, nor between
  /// a backward that was not the last one (set_is_last_backward), or is not finalized, and the end of that.
  bool is_quiescent() const { return step_.is_quiescent() && reductions_.is_empty(); }

  /// Between these a user's hook runs on a reduced gradient. What it reads is gathered for it and released behind it, and
  /// is no part of the learned order. With the lock held.
  void begin_user_hook() override;
  void end_user_hook() noexcept override;

  CommContext& comm_ctx() { return comm_ctx_; }

  /// Some groups are never gathered (one rank's), so no gather of theirs could wait for anything.
  bool has_unreleased_groups() const;

  Scheduler& scheduler() { return scheduler_; }

 private:
  class BackwardEnd;

  // step boundaries (step.cpp)
  void enter_phase(int64_t task, const OperatorUse& use);
  void enter(StepEvent event);
  void begin_forward();
  void recheck();
  void begin_backward(int64_t task);
  void watch_end_of(int64_t task);
  void end_task(int64_t task);
  void abandon_task(int64_t task) noexcept;
  void end_backward();
  void leave_for_finalization();
  void end_step();
  void close_step(bool waits_for_copies = true);
  void release_everything();
  void prepare_step(StepEvent begins);
  void tell_of_beginning() const;
  void tell_of_end() const;

  // what the scheduler wants done (root_context.cpp)
  void apply(const Actions& actions);
  void execute(const Action& action);
  void unshard_now(ParamGroup& group);
  void reshard_now(ParamGroup& group, bool after_forward);
  void prefetch_listed(const ParamGroup& group);
  void report_arrivals();
  void report_states();
  void tell(GroupEvent event, ParamGroup& group) { apply(scheduler_.on(event, group.identity().id)); }
  ParamGroup* find(int id) const { return groups_by_id_[static_cast<size_t>(id)]; }

  // what uses tell it (root_context.cpp)
  void read(std::span<ParamGroup* const> used, const OperatorUse& use);
  void read_beside(std::span<ParamGroup* const> used);
  void follow_step(std::span<ParamGroup* const> used);

  // gradients (step.cpp)
  const ParamGroup* gather_before_reduce(const ParamGroup& finished);
  ReduceJob pack_gradients(ParamGroup& group);
  void flush_gradients();

  /// What its launch is to wait for, on the host; a stream may have been told to wait (reduction_start.cpp).
  ReductionQueue::Waits hold_back(ReduceJob& reduction, const ParamGroup* gathered);

  RootMutex mutex_;
  Options options_;
  std::vector<ParamGroup*> groups_by_id_;
  bool has_started_ = false;

  StepMachine step_;
  Scheduler scheduler_;
  std::vector<int> held_before_hook_;
  CommContext comm_ctx_;
  ReductionQueue reductions_{mutex_, comm_ctx_};
};

}  // namespace fsdp
