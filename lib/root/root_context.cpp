#include "root/root_context.hpp"

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "group/reduce/reduce_call.hpp"
#include "root/group_port.hpp"

// What comes to a root from operators and from users.
namespace fsdp {

namespace {

thread_local int user_hooks = 0;  // that run on this thread, of any root

using Ids = c10::SmallVector<int, 8>;

Ids ids_of(std::span<ParamGroup* const> groups) {
  Ids ids;
  for (const auto* group : groups) ids.push_back(group->identity().id);
  return ids;
}

/// Written since they were gathered: these are gathered again. One rank's, which are not, follow at once.
Ids take_writes(std::span<ParamGroup* const> used) {
  Ids written;
  for (auto* group : used) {
    if (!group->changes().is_stale()) continue;
    written.push_back(group->identity().id);
    if (group->parts().is_never_released()) group->changes().refresh();
  }
  return written;
}

}  // namespace

void RootContext::add(const std::shared_ptr<ParamGroup>& group) {
  std::lock_guard lock(mutex_);
  auto& port = GroupPort::of(*group);
  port.set_root(shared_from_this());
  runner_.add(*group);
  port.mark_between_steps(!in_step());
}

void RootContext::begin_on_current_stream() {
  runner_.comm_ctx().all_gather_stream.begin_step();
  stream_.reset();
  if (runner_.groups().empty()) return;
  const auto device = runner_.groups().front()->parts().config.device;
  if (SideStream::exists_on(device)) stream_ = current_stream(device);
}

void RootContext::touch(std::span<ParamGroup* const> used, const OperatorUse& use) {
  std::lock_guard lock(mutex_);
  auto& trace = runner_.comm_ctx().trace;
  trace.look_for_listener();
  trace.note_use(nullptr);
  if (at::in_parallel_region()) {
    // A worker in the middle of somebody's operator: its order is chance, so it decides nothing.
    return runner_.apply(runner_.scheduler().read_beside(ids_of(used), {}, Scheduler::Reader::kThread));
  }
  if (user_hooks > 0) return in_step() ? read_beside(used) : read(used, use);  // else it is another root's hook
  enter_phase(torch::autograd::get_current_graph_task_id(), use);
  if (!in_step())
    read(used, use);
  else
    follow_step(used);
}

void RootContext::read(std::span<ParamGroup* const> used, const OperatorUse& use) {
  take_over_modes();
  for (auto* group : used)
    require_state(!group->parts().config.throws_outside_step,
                  "{}: this sharded parameter was read outside a step; use fsdp::forward_scope or "
                  "fsdp::call, or set fault_outside_step to kGather",
                  use.param_name);
  apply_for(used, runner_.scheduler().read(ids_of(used), take_writes(used)));
}

void RootContext::read_beside(std::span<ParamGroup* const> used) {
  apply_for(used, runner_.scheduler().read_beside(ids_of(used), take_writes(used)));
}

/// The current stream may read `used` behind it.
void RootContext::apply_for(std::span<ParamGroup* const> used, const Actions& actions) {
  runner_.apply(actions);
  for (auto* group : used) group->unsharder().wait_before_use();
}

void RootContext::check_modes(std::span<ParamGroup* const> used) const {
  for (const auto* group : used)
    if (GroupPort::of(*group).follows_mode() && hooks_) [[unlikely]]
      hooks_->check_mode(*group);
}

void RootContext::follow_step(std::span<ParamGroup* const> used) {
  auto& scheduler = runner_.scheduler();
  const bool forward = is_forward(step_.state());
  const auto ids = ids_of(used);
  if (forward) check_modes(used);
  if (scheduler.starts_over(ids)) recheck(StepEvent::kForwardBegins);
  runner_.ready().clear();
  // Written since it was gathered: forward goes on with the new values, as a plain module would.
  const auto written = forward ? take_writes(used) : Ids();
  {
    const BelowResidency below;  // here, as to go there and back costs each action more than some of them do
    const Range range(runner_.comm_ctx().trace, forward ? "FSDP::pre_forward" : "FSDP::pre_backward",
                      used.front()->identity());
    apply_for(used, scheduler.use(ids, written));
  }
  runner_.ready().set(used, torch::autograd::get_current_graph_task_id());
  runner_.start_reductions(scheduler.reduce_order().on_use(ids));
  auto& comm_ctx = runner_.comm_ctx();
  comm_ctx.all_gather_stream.end_wait_for_event();
  comm_ctx.trace.note_use(&used.front()->identity());
}

/// Another forward in front of a backward: requires_grad may have been set since the first.
void RootContext::take_over_settings() {
  tell_of_beginning();
  for (auto* group : runner_.groups()) group->changes().sync_requires_grad();
}

void RootContext::begin_user_hook(const ParamGroup& group) {
  if (const auto hooks = hooks_) hooks->show_for_hook(group);  // first: it may throw
  held_before_hook_ = runner_.scheduler().groups().held();
  ++user_hooks;
}

void RootContext::end_user_hook() noexcept {
  --user_hooks;
  try {
    runner_.apply(runner_.scheduler().end_user_hook(held_before_hook_));
  } catch (const std::exception& error) {
    log().error("releasing the parameters that a gradient hook has read failed: {}", error.what());
  }
}

void RootContext::control(ParamGroup& group, GroupEvent event) {
  std::lock_guard lock(mutex_);
  if (event != GroupEvent::kUserLetsGo) runner_.comm_ctx().trace.look_for_listener();
  if (event == GroupEvent::kUserUnshards) {
    take_over_modes();
    if (group.changes().is_stale()) runner_.tell(GroupEvent::kWritten, group);
  }
  const bool ends_forward = event == GroupEvent::kUserLetsGo && is_forward(step_.state());
  std::optional<Range> range;
  if (ends_forward) range.emplace(runner_.comm_ctx().trace, "FSDP::post_forward", group.identity());
  runner_.tell(event, group);
}

std::shared_ptr<void> RootContext::hold_steps(std::string_view caller) {
  std::lock_guard lock(mutex_);
  require_state(is_quiescent(),
                "{}: cannot be called inside a forward, a backward or a scope of the module, or before the last of several "
                "backwards (set_is_last_backward) or its finalization. Run the backward of the last forward first, or call "
                "reset_iter_state(); a forward without backward belongs under torch::NoGradGuard or fsdp::forward_scope",
                caller);
  step_.pin();
  return {static_cast<void*>(nullptr), [root = shared_from_this()](void*) {
            std::lock_guard lock(root->mutex_);
            root->step_.unpin();
          }};
}

void RootContext::reset_iter_state() {
  std::lock_guard lock(mutex_);
  require_state(step_.task_count() == 0, "reset_iter_state: cannot be called inside a backward; call it after the exception "
                                         "has left backward()");
  // Scopes that modules' hooks have opened, whose forwards will not come to their end.
  for (size_t open = hooks_ ? hooks_->give_up_forwards() : 0; open > 0; --open) leave_scope();
  release_everything();
  for (auto* group : runner_.groups()) {
    drop_unreduced(group->gradients());
    for (auto& param : group->params())
      if (const auto local_tensor = param.local_tensor(); local_tensor.defined())
        local_tensor.mutable_grad().reset();
    if (const auto& classes = group->parts().local_shards) classes->drop_gradients();
  }
  tell_of_end(ShowsEvent::kGivenUp);
}

void RootContext::set_manual_finalization(bool value) {
  std::lock_guard lock(mutex_);
  step_.set_manual_finalization(value);
}

int64_t RootContext::finalize_backward() {
  std::lock_guard lock(mutex_);
  require_state(step_.is_manual(),
                "finalize_backward: backwards of this root finalize themselves; call "
                "set_manual_backward_finalization(true) before backward");
  step_.check(StepEvent::kFinalize);
  // What backwards left that ended by themselves counts too: without synchronisation, or not the last ones.
  const bool is_left = !runner_.reductions().is_empty() ||
                       std::ranges::any_of(runner_.groups(), [](auto* group) { return has_gradients_to_reduce(*group); });
  if (step_.state() != StepState::kDue && !is_left) return 0;
  runner_.comm_ctx().trace.look_for_listener();
  runner_.reduce_left();
  enter(StepEvent::kFinalize);
  close_step(/*waits_for_copies=*/false);  // whoever waits for the gradients does
  return step_.ticket();
}

void RootContext::wait_for_gradients(int64_t ticket) {
  std::lock_guard lock(mutex_);
  step_.check_ticket(ticket);
  auto& comm_ctx = runner_.comm_ctx();
  comm_ctx.trace.look_for_listener();
  runner_.reductions().finish();
  for (auto* group : runner_.groups()) group->parts().shard.wait_for_copies();
  comm_ctx.meter.end_step();  // what the reductions launched and copied is the step's
  if (step_.state() == StepState::kFinalizing) enter(StepEvent::kWaitedFor);  // else a user's hook has given it up
  tell_of_end();
}

}  // namespace fsdp
