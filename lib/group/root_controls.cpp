#include <algorithm>

#include "base/require.hpp"
#include "group/reduce/unreduced_gradients.hpp"
#include "group/root_context.hpp"

// What users ask of a root: gathers and releases by hand, no steps for a while, an end to a step that has failed, and
// backwards that end when the caller says so (set_manual_backward_finalization).
namespace fsdp {

void RootContext::unshard(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  take_over_modes();
  if (group.is_stale()) let_go(group);
  group.holds.add(Hold::kByUser);
  start_unshard(group);
}

void RootContext::wait_for_unshard(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  if (is_unsharding(group.unsharder().state())) finish_unshard(group);
}

void RootContext::end_hold(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  group.holds.end(HoldEvent::kUserLetsGo);
}

void RootContext::reshard(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  group.holds.end(HoldEvent::kUserReshards);
  let_go(group);
}

void RootContext::hold_steps(std::string_view caller) {
  std::lock_guard lock(mutex_);
  require_state(is_quiescent(),
                "{}: not inside a forward, a backward or a scope of the module, nor before the last of several "
                "backwards (set_is_last_backward) or its finalization. Run the backward of the last forward first, or "
                "reset_iter_state(); a forward without backward belongs under torch::NoGradGuard or fsdp::forward_scope",
                caller);
  ++steps_held_;
}

void RootContext::resume_steps() noexcept {
  std::lock_guard lock(mutex_);
  --steps_held_;
}

void RootContext::reset_iter_state() {
  std::lock_guard lock(mutex_);
  require_state(tasks_.empty(), "reset_iter_state inside a backward; call it after the exception "
                                "has left backward()");
  release_everything();
  for (auto* group : comm_ctx_.groups) {
    drop_unreduced_gradients(*group);
    for (auto& param : group->params())
      if (const auto registered = param.registered(); registered.defined())
        registered.mutable_grad().reset();
    if (auto* classes = group->classes()) classes->drop_gradients();
  }
  tell_of_end();
}

void RootContext::set_manual_finalization(bool value) {
  std::lock_guard lock(mutex_);
  if (value == finalization_.is_manual) return;
  require_state(phase_ != Phase::kBackward && tasks_.empty() && !finalization_.is_due && !finalization_.is_awaited,
                "set_manual_backward_finalization: a backward is under way or not finalized; call "
                "finalize_backward (and wait for it) or reset_iter_state first");
  finalization_.is_manual = value;
}

/// What is complete has been reduced; the rest waits, with the sums of backwards without synchronisation.
void RootContext::leave_for_finalization() {
  finalization_.is_due = true;
  for (auto* group : comm_ctx_.groups) {
    if (!group->reduction().requires_gradient_sync) accumulate_in_reduce_dtype(*group);
    group->tally.end_backward();
  }
}

void RootContext::check_can_finalize() const {
  require_state(finalization_.is_manual,
                "finalize_backward: backwards of this root finalize themselves; call "
                "set_manual_backward_finalization(true) before backward");
  require_state(tasks_.empty(), "finalize_backward inside a backward; call it after backward() has returned");
  require_state(!finalization_.is_awaited,
                "finalize_backward: nobody has waited for the gradients of the last call; call wait() on what "
                "finalize_backward_async returned");
  require_state(phase_ != Phase::kForward,
                "finalize_backward between a forward and its backward; call it after backward()");
}

int64_t RootContext::finalize_backward() {
  std::lock_guard lock(mutex_);
  check_can_finalize();
  // What backwards left that ended by themselves counts too: without synchronisation, or not the last ones.
  const bool is_left = !reductions_.empty() || std::ranges::any_of(groups(), [](auto* group) {
    return group->reduction().requires_gradient_sync && has_unreduced_gradients(*group);
  });
  if (!finalization_.is_due && !is_left) return 0;
  comm_ctx_.trace.look_for_listener();
  flush_gradients();
  finalization_.is_due = false;
  finalization_.is_awaited = true;
  close_step(/*waits_for_copies=*/false);  // whoever waits for the gradients does
  return ++finalization_.ticket;
}

void RootContext::wait_for_gradients(int64_t ticket) {
  std::lock_guard lock(mutex_);
  require_state(finalization_.is_awaited && ticket == finalization_.ticket,
                "GradientReductionHandle: reset_iter_state has dropped the gradients that it was to wait for; "
                "run the step again");
  comm_ctx_.trace.look_for_listener();
  finish_reductions();
  for (auto* group : comm_ctx_.groups) group->parts().shard.wait_for_copies();
  comm_ctx_.meter.end_step();  // what the reductions launched and copied is the step's
  finalization_.is_awaited = false;
  tell_of_end();
}

}  // namespace fsdp
