#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "fsdp/reduce_scatter_start.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/gradient_reduction.hpp"
#include "group/root_mutex.hpp"
#include "group/step_follower.hpp"
#include "schedule/exec_order.hpp"
#include "schedule/residency_budget.hpp"
#include "schedule/step_machine.hpp"

namespace fsdp {

/// The one scheduler: decides when the groups of one root are gathered, released and reduced.
///
/// A step goes idle -> forward -> backward -> idle. Touches that come from the dispatcher drive it;
/// the learned order of touches (ExecOrder) tells what to gather ahead and what will not be needed
/// again. What it decides depends on options and uses alone, never on whether a collective has
/// completed, so that all ranks launch the same sequence (T3).
///
/// Threads: a root's steps belong to one thread at a time, but operators on several may ask for its groups. So whatever
/// operators, autograd and the controls call takes the lock. What only looks, or hands out a part of the root, does not: it
/// is for the thread that runs the steps, or to be called with the lock held.
class RootContext : public std::enable_shared_from_this<RootContext> {
 public:
  struct Options {
    int prefetch_distance = 1;
    bool is_last_backward = true;
    std::optional<int64_t> unsharded_byte_budget = {};
    ReduceScatterStart reduce_scatter_start = ReduceScatterStart::kBySize;
  };

  RootMutex& mutex() { return mutex_; }

  // ===== These take the lock.

  // --- which groups
  /// Takes a group over; in the order of use as far as it is known (depth-first).
  void add(const std::shared_ptr<ParamGroup>& group);
  void remove(ParamGroup& group);

  // --- what the dispatcher and autograd report
  /// One operator is about to use `used` (all of this root): they are readable when this returns.
  void touch(std::span<ParamGroup* const> used, const OperatorUse& use);
  void gradient_arrived(ParamGroup& group, size_t index, const at::Tensor& handle);

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

  /// No step may begin until `resume_steps`: the handles show other memory for a while. Counts.
  /// Throws StateError, beginning with `caller`, unless `is_quiescent()`.
  void hold_steps(std::string_view caller);
  void resume_steps() noexcept;

  // --- manual finalization of backwards (root_controls.cpp)
  void set_manual_finalization(bool value);
  /// Reduces what is left of the backwards since the last call and ends the step, but for waiting. Returns
  /// the ticket of what is to be waited for; 0: nothing.
  int64_t finalize_backward();
  void wait_for_gradients(int64_t ticket);

  /// Counts packed gradients together from now on.
  static void share_reduction_buffers(std::span<const std::shared_ptr<RootContext>> roots);

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
  bool is_quiescent() const { return step_.is_quiescent() && reductions_.empty(); }

  /// Between these a user's hook runs on a reduced gradient. What it reads is gathered for it and released behind it, and
  /// is no part of the learned order. With the lock held.
  void begin_user_hook();
  void end_user_hook() noexcept;

  CommContext& comm_ctx() { return comm_ctx_; }
  /// One of this group's is under way that does its part when its turn comes, on the current stream.
  bool has_reduction_in_turn(const ParamGroup& group) const;

  /// Some groups are never gathered (one rank's), so no gather of theirs could wait for anything.
  bool has_unreleased_groups() const;

  const ExecOrder& forward_order() const { return forward_; }
  const ExecOrder& backward_order() const { return backward_; }
  ResidencyBudget& budget() { return budget_; }

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
  void end_pass();
  void end_step();
  void close_step(bool waits_for_copies = true);
  void release_everything();
  void prepare_step(StepEvent begins);
  void release_between_steps();
  void tell_of_beginning() const;
  void tell_of_end() const;

  // what is done to one group (root_context.cpp)
  void start_unshard(ParamGroup& group);
  CommSlot* slot_for(ParamGroup& group);
  void finish_unshard(ParamGroup& group);
  void forget_released();
  void let_go(ParamGroup& group);
  void release(ParamGroup& group);
  void follow_writes(std::span<ParamGroup* const> used);
  void make_readable(std::span<ParamGroup* const> used);
  void read(std::span<ParamGroup* const> used, const OperatorUse& use);
  void read_in_hook(std::span<ParamGroup* const> used, const OperatorUse& use);
  void follow_step(std::span<ParamGroup* const> used);
  void release_unneeded(std::span<ParamGroup* const> used);
  bool is_needed(const ParamGroup& group, std::span<ParamGroup* const> used) const;
  bool follows_plan() const;
  bool is_kept_by_plan(const ParamGroup& group) const;
  void prefetch(std::span<ParamGroup* const> used);
  ParamGroup* prefetch_upcoming(std::span<ParamGroup* const> used);
  void prefetch_for_backward(std::span<ParamGroup* const> used);
  void release_ahead_of_backward(std::span<ParamGroup* const> used);
  void take_over_ahead_of_backward();
  void release_for_plan(std::span<ParamGroup* const> used);
  ParamGroup* prefetch_past(const ParamGroup& finished);
  bool make_room(std::span<ParamGroup* const> used, const ParamGroup* candidate);
  bool counts_for_limit(const ParamGroup& group, std::span<ParamGroup* const> used) const;
  void prefetch_listed(const std::vector<std::weak_ptr<ParamGroup>>& groups);
  bool is_kept_on_purpose(const ParamGroup& group) const;
  bool is_used_again(const ParamGroup& group) const;
  ParamGroup* find(int id) const { return groups_by_id_[static_cast<size_t>(id)]; }

  // gradients (step.cpp)
  void release_finished(ParamGroup& group);
  GradientReduction pack_gradients(ParamGroup& group);
  void launch(GradientReduction reduction);

  // when reductions begin (reduction_start.cpp)
  enum class Waits { kNot, kForUse, kForNextBackward };
  bool is_urgent(const ParamGroup& gathered) const;
  Waits hold_back(GradientReduction& reduction, const ParamGroup* gathered);
  void launch_or_postpone(GradientReduction reduction, const ParamGroup* gathered);
  void launch_oldest_postponed();
  void launch_postponed(std::span<ParamGroup* const> used);
  void launch_behind_backward();
  void launch_all_postponed();

  // packed gradients (reduction_buffers.cpp)
  void make_room_for_reduction(const ParamGroup& group);
  bool free_oldest_reduction_input();
  size_t reduction_inputs() const;
  void flush_gradients();
  void free_reduction_inputs();
  void finish_reductions();
  void drop_reductions(const ParamGroup* of);

  RootMutex mutex_;
  Options options_;
  std::vector<ParamGroup*> groups_by_id_;
  std::vector<ParamGroup*> held_;
  bool has_started_ = false;

  StepMachine step_;
  std::vector<ParamGroup*> held_before_hook_;
  // Passes of three kinds, each with its own order: a scope without autograd (eval, generation)
  // must not unlearn what training does.
  ExecOrder forward_, backward_, inference_;
  ExecOrder* order_ = nullptr;  // of the pass under way
  ResidencyBudget budget_;
  int forwards_ = 0, forwards_before_backward_ = 0;  // of this step; of the last one that had a backward
  int backwards_ = 0;   // begun so far
  int learned_in_ = 1;  // which of them the learned order is of
  ParamGroup* last_used_ = nullptr;
  std::vector<ParamGroup*> current_;
  std::vector<GradientReduction> reductions_;  // under way, oldest first
  struct Postponed {
    GradientReduction reduction;
    Waits waits;              // kNot: but for those before it
    const ParamGroup* until;  // whose use it waits for
    c10::Stream stream;       // that it was packed on
  };
  std::deque<Postponed> postponed_;            // packed, oldest first
  bool has_shifted_reductions_ = false;        // in this backward
  /// Roots that count packed gradients together, this one among them; null: this one alone.
  std::shared_ptr<std::vector<std::weak_ptr<RootContext>>> sharers_;
  CommContext comm_ctx_;
};

}  // namespace fsdp
