#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "group/param_group.hpp"
#include "root/action_runner.hpp"
#include "root/step_hooks.hpp"
#include "schedule/step_machine.hpp"

namespace fsdp {

/// One root: its lock, its step, and the only way in for operators, autograd and users. What they do goes to the scheduler,
/// whose actions the runner does.
///
/// Threads: a root's steps belong to one thread at a time, but operators on several may ask for its groups. So whatever
/// operators, autograd and the controls call takes the lock. What only looks, or hands out a part of the root, does not: it
/// is for the thread that runs the steps, or to be called with the lock held.
class RootContext final : public UserHooks, public std::enable_shared_from_this<RootContext> {
 public:
  struct Options {
    bool is_last_backward = true;
    Scheduler::Options schedule = {};
  };

  RootMutex& mutex() { return mutex_; }

  // ===== These take the lock.

  // --- which groups
  /// Takes a group over; in the order of use as far as it is known (depth-first).
  void add(const std::shared_ptr<ParamGroup>& group);

  // --- what the dispatcher and autograd report
  /// One operator is about to use `used` (all of this root): they are readable when this returns.
  void touch(std::span<ParamGroup* const> used, const OperatorUse& use);
  void gradient_arrived(ParamGroup& group, size_t index, const at::Tensor& unsharded_param);
  /// Inside a backward of one of the root's outputs: it is the root's though it may reach none of its parameters, if a forward
  /// waits for one, or gradients do for a reduction.
  void join_backward();

  // --- controls
  /// What a user, or the runtime for itself, wants of one group.
  void control(ParamGroup& group, GroupEvent event);
  void reset_iter_state();
  void enter_scope();
  void leave_scope() noexcept;

  /// No step may begin while what is returned lives: the unsharded parameters show other memory for a while.
  /// Throws StateError, beginning with `caller`, unless `is_quiescent()`.
  [[nodiscard]] std::shared_ptr<void> hold_steps(std::string_view caller);

  // --- manual finalization of backwards
  void set_manual_finalization(bool value);
  /// Reduces what is left of the backwards since the last call and ends the step, but for waiting. Returns
  /// the ticket of what is to be waited for; 0: nothing.
  int64_t finalize_backward();
  void wait_for_gradients(int64_t ticket);

  // ===== These do not: on the thread that runs the steps, or with the lock held.

  /// Groups, scheduler, and what the groups share.
  ActionRunner& runner() { return runner_; }
  /// What users set of the root; `configure` changes it.
  Options& options() { return options_; }
  /// What only the module tree knows and does; may be null.
  std::shared_ptr<StepHooks>& hooks() { return hooks_; }
  /// Between steps lets groups follow their modules' modes; within one does nothing.
  void take_over_modes();

  const StepMachine& step() const { return step_; }
  /// True once a step has begun: then the set of groups is fixed.
  bool has_started() const { return has_started_; }
  /// The time to change what a step relies on, and to look at what it has left: not in a step or a scope, nor between
  /// a backward that was not the last one (set_is_last_backward), or is not finalized, and the end of that.
  bool is_quiescent() const { return step_.is_quiescent() && runner_.reductions().is_empty(); }

 private:
  class BackwardEnd;

  /// Between these a user's hook runs on a reduced gradient. What it reads is gathered for it and released behind it, and
  /// is no part of the learned order. With the lock held.
  void begin_user_hook(const ParamGroup& group) override;
  void end_user_hook() noexcept override;

  // step boundaries (step.cpp)
  void enter_phase(int64_t task, const OperatorUse& use);
  void enter(StepEvent event);
  void begin_forward();
  void take_over_settings();
  void recheck(StepEvent begins);
  void begin_backward(int64_t task);
  bool awaits_backward();
  void watch_end_of(int64_t task);
  void end_task(int64_t task);
  void abandon_task(int64_t task) noexcept;
  void end_backward();
  void end_step();
  void close_step(bool waits_for_copies = true);
  void release_everything();
  void prepare_step(StepEvent begins);
  void begin_on_current_stream();
  void tell_of_beginning() const;
  void tell_of_end(ShowsEvent event = ShowsEvent::kStepEnds) const;

  // uses (root_context.cpp)
  void read(std::span<ParamGroup* const> used, const OperatorUse& use);
  void read_beside(std::span<ParamGroup* const> used);
  void check_modes(std::span<ParamGroup* const> used) const;
  void follow_step(std::span<ParamGroup* const> used);
  void apply_for(std::span<ParamGroup* const> used, const Actions& actions);

  bool in_step() const { return fsdp::in_step(step_.state()); }

  RootMutex mutex_;
  Options options_;
  StepMachine step_;
  ActionRunner runner_{mutex_, step_, *this};
  std::shared_ptr<StepHooks> hooks_;
  std::vector<int> held_before_hook_;
  std::thread::id thread_;  ///< of the last forward
  std::optional<c10::Stream> stream_;  ///< current when the last step began; none on a device without streams
  bool has_started_ = false;
};

}  // namespace fsdp
