#include <algorithm>

#include "base/require.hpp"
#include "group/reduce/reduce_call.hpp"
#include "root/root_context.hpp"

// What is asked of a root from outside: to let a group go for good, gathers and releases by hand, no steps for a while, an
// end to a step that has failed, and backwards that end when the caller says so (set_manual_backward_finalization).
namespace fsdp {

void RootContext::remove(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  if (scheduler_.groups().is_held(group.identity().id)) tell(GroupEvent::kWritten, group);
  comm_ctx_.gather_slots.remove(group);
  reductions_.drop(&group);
  comm_ctx_.trace.remove(group.identity());
  std::erase(comm_ctx_.groups, &group);
  comm_ctx_.reduction_slots.remove(group);
  scheduler_.remove(group.identity().id);
  groups_by_id_[static_cast<size_t>(group.identity().id)] = nullptr;
}

void RootContext::unshard(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  take_over_modes();
  if (group.is_stale()) tell(GroupEvent::kWritten, group);
  tell(GroupEvent::kUserUnshards, group);
}

void RootContext::wait_for_unshard(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  tell(GroupEvent::kUserWaits, group);
}

void RootContext::end_hold(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  tell(GroupEvent::kUserLetsGo, group);
}

void RootContext::reshard(ParamGroup& group) {
  std::lock_guard lock(mutex_);
  comm_ctx_.trace.look_for_listener();
  tell(GroupEvent::kUserReshards, group);
}

void RootContext::hold_steps(std::string_view caller) {
  std::lock_guard lock(mutex_);
  require_state(is_quiescent(),
                "{}: not inside a forward, a backward or a scope of the module, nor before the last of several "
                "backwards (set_is_last_backward) or its finalization. Run the backward of the last forward first, or "
                "reset_iter_state(); a forward without backward belongs under torch::NoGradGuard or fsdp::forward_scope",
                caller);
  step_.pin();
}

void RootContext::resume_steps() noexcept {
  std::lock_guard lock(mutex_);
  step_.unpin();
}

void RootContext::reset_iter_state() {
  std::lock_guard lock(mutex_);
  require_state(step_.task_count() == 0, "reset_iter_state inside a backward; call it after the exception "
                                "has left backward()");
  release_everything();
  for (auto* group : comm_ctx_.groups) {
    group->gradients().drop();
    for (auto& param : group->params())
      if (const auto sharded_param = param.sharded_param(); sharded_param.defined())
        sharded_param.mutable_grad().reset();
    if (auto* classes = group->classes()) classes->drop_gradients();
  }
  tell_of_end();
}

void RootContext::set_manual_finalization(bool value) {
  std::lock_guard lock(mutex_);
  step_.set_manual_finalization(value);
}

/// What is complete has been reduced; the rest waits, with the sums of backwards without synchronisation.
void RootContext::leave_for_finalization() {
  for (auto* group : comm_ctx_.groups) {
    if (!group->reduction().requires_gradient_sync) group->gradients().accumulate(group->gradient_dtypes());
    group->gradients().end_backward();
  }
}

int64_t RootContext::finalize_backward() {
  std::lock_guard lock(mutex_);
  require_state(step_.is_manual(),
                "finalize_backward: backwards of this root finalize themselves; call "
                "set_manual_backward_finalization(true) before backward");
  step_.check(StepEvent::kFinalize);
  // What backwards left that ended by themselves counts too: without synchronisation, or not the last ones.
  const bool is_left = !reductions_.is_empty() || std::ranges::any_of(groups(), [](auto* group) {
    return has_gradients_to_reduce(*group);
  });
  if (step_.state() != StepState::kDue && !is_left) return 0;
  comm_ctx_.trace.look_for_listener();
  flush_gradients();
  enter(StepEvent::kFinalize);
  close_step(/*waits_for_copies=*/false);  // whoever waits for the gradients does
  return step_.ticket();
}

void RootContext::wait_for_gradients(int64_t ticket) {
  std::lock_guard lock(mutex_);
  step_.check_ticket(ticket);
  comm_ctx_.trace.look_for_listener();
  reductions_.finish();
  for (auto* group : comm_ctx_.groups) group->parts().shard.wait_for_copies();
  comm_ctx_.meter.end_step();  // what the reductions launched and copied is the step's
  if (step_.state() == StepState::kFinalizing) enter(StepEvent::kWaitedFor);  // else a user's hook has given it up
  tell_of_end();
}

}  // namespace fsdp
