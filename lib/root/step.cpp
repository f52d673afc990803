#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/work.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/function_scope.hpp"
#include "group/reduce/reduce_call.hpp"
#include "root/autograd/left_gradients.hpp"
#include "root/facts_of.hpp"
#include "root/group_port.hpp"
#include "root/sanitizer_faults.hpp"

// The boundaries of a step, and what happens to gradients at them.
namespace fsdp {

namespace {

/// One line about a root, for whoever asks for information.
void say_what_is_sharded(std::span<ParamGroup* const> groups) {
  if (groups.empty() || !log().should_log(spdlog::level::info)) return;
  int64_t sharded = 0, unsharded = 0;
  const auto* widest = &groups.front()->identity().mesh_info;
  const auto ranks_of_mesh = [](const MeshInfo& info) { return info.shard_size() * info.replicate_size(); };
  for (const auto* group : groups) {
    sharded += group->parts().layout.stored().rank_bytes();
    unsharded += group->parts().unsharded_bytes();
    const auto& info = group->identity().mesh_info;
    if (ranks_of_mesh(info) > ranks_of_mesh(*widest)) widest = &info;
  }
  log().info("first step: {} groups, {} bytes sharded on this rank, {} unsharded; {} ranks over {}", groups.size(),
             with_separators(sharded), with_separators(unsharded), ranks_of_mesh(*widest), widest->group_in_world().backend());
}

}  // namespace

/// Queued in an autograd task as its last callback. If the task dies of an exception instead, the
/// callback is destroyed without having run: that is how a failed backward is noticed at once.
class RootContext::BackwardEnd {
 public:
  BackwardEnd(std::weak_ptr<RootContext> context, int64_t task) : context_(std::move(context)), task_(task) {}
  ~BackwardEnd() {
    if (auto context = context_.lock(); context && !has_run_) context->abandon_task(task_);
  }
  void run() {
    has_run_ = true;
    if (auto context = context_.lock()) context->end_task(task_);
  }

 private:
  std::weak_ptr<RootContext> context_;
  int64_t task_;
  bool has_run_ = false;
};

void RootContext::enter_phase(int64_t task, const OperatorUse& use) {
  if (task != -1) {
    if (step_.task_count() == 0)
      begin_backward(task);
    else if (!step_.has_task(task))
      watch_end_of(task);  // a backward inside a backward: the outermost one ends the step
    return;
  }
  if (!use.records_autograd) return;
  if (!in_step()) begin_forward();
  step_.note_autograd();
}

void RootContext::enter(StepEvent event) {
  const bool was_in_step = in_step();
  step_.on(event);
  if (in_step() == was_in_step) return;
  for (auto* group : runner_.groups()) GroupPort::of(*group).mark_between_steps(was_in_step);
}

void RootContext::tell_of_beginning() const {
  if (const auto hooks = hooks_) hooks->take_over();
}

void RootContext::tell_of_end(ShowsEvent event) const {
  if (const auto hooks = hooks_) hooks->show(event);  // kept: a view may let other threads run, which shard more
}

void RootContext::prepare_step(StepEvent begins) {
  step_.check(begins);
  runner_.apply(runner_.scheduler().release_between_steps());  // what reads have left behind
  tell_of_beginning();
  recheck(begins);
  throw_faults(*this);
  has_started_ = true;  // a step that is refused has not begun
  begin_on_current_stream();
  runner_.scheduler().plan(begins);
}

void RootContext::recheck(StepEvent begins) {
  if (hooks_) hooks_->check_modules();
  for (auto* group : runner_.groups()) {
    group->changes().validate();
    if (!in_step()) group->changes().sync_grad_dtypes();
    group->changes().sync_requires_grad();
    if (begins == StepEvent::kForwardBegins) group->notes().say(*group);
    if (!group->unsharder().is_held()) continue;
    if (!group->parts().is_never_released() && group->changes().is_stale()) runner_.tell(GroupEvent::kWritten, *group);
    group->changes().sync_versions();
  }
}

/// Not before a backward: what a forward before it saved is in the dtype of that forward.
void RootContext::take_over_modes() {
  if (hooks_ && !in_step() && !step_.is_pinned()) hooks_->follow_modes();
}

void RootContext::begin_forward() {
  auto& trace = runner_.comm_ctx().trace;
  trace.look_for_listener();
  const Range range(trace, [] { return std::string("FSDP::root_pre_forward"); });
  const bool is_first = !has_started_;
  thread_ = std::this_thread::get_id();
  take_over_modes();
  prepare_step(StepEvent::kForwardBegins);
  enter(StepEvent::kForwardBegins);
  runner_.comm_ctx().meter.begin_step();
  runner_.scheduler().begin_forward(at::GradMode::is_enabled());
  trace.note_first_values(take_first_values(runner_.groups()));  // there are none but in the first
  trace.begin_phase(CollectiveTrace::Phase::kForward);
  if (is_first) say_what_is_sharded(runner_.groups());
}

void RootContext::begin_backward(int64_t task) {
  end_functions();
  runner_.comm_ctx().trace.look_for_listener();
  const bool is_of_forward = in_step();
  if (!is_of_forward) {
    // A second backward over a retained graph: a step of its own, unless the one before is still to be reduced.
    const bool goes_on = !is_quiescent();
    prepare_step(StepEvent::kBackwardBegins);
    if (!goes_on) runner_.comm_ctx().meter.begin_step();
  } else {
    tell_of_beginning();  // gradients may have been dropped since the forward
  }
  enter(StepEvent::kBackwardBegins);
  runner_.comm_ctx().trace.begin_phase(CollectiveTrace::Phase::kBackward);
  for (const int id : runner_.scheduler().begin_backward(is_of_forward))
    if (auto* group = runner_.find(id); group != nullptr && group->changes().is_stale())
      runner_.tell(GroupEvent::kWritten, *group);
  runner_.ready().clear();
  for (auto* group : runner_.groups()) {
    // Written between forward and backward: what autograd saved is out of date, and is to say so.
    if (group->unsharder().is_held()) group->changes().sync_versions();
    // Zeros are for what is trainable now.
    if (group->options().reduce.reduces_unused_params) group->changes().sync_requires_grad();
  }
  watch_end_of(task);
}

/// At its end, when it is known that nothing else has told of it: what autograd saved is looked at in the meantime.
void RootContext::join_backward() {
  std::lock_guard lock(mutex_);
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task == -1 || !awaits_backward()) return;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
    const auto root = weak.lock();
    if (!root) return;
    std::lock_guard lock(root->mutex_);
    if (root->awaits_backward()) root->begin_backward(task);
  });
}

bool RootContext::awaits_backward() {
  if (step_.task_count() > 0 || step_.is_pinned()) return false;
  if (is_forward(step_.state()) && !step_.is_in_scope()) return true;  // within one, more of the forward follows
  if (!step_.is_manual() && std::ranges::any_of(runner_.groups(), [](auto* group) { return owes_zeros(*group); })) return true;
  return left_gradients_of(*this) == LeftGradients::kToReduce;
}

void RootContext::watch_end_of(int64_t task) {
  step_.begin_task(task);
  auto end = std::make_shared<BackwardEnd>(weak_from_this(), task);
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->run(); });
}

void RootContext::end_task(int64_t task) {
  std::lock_guard lock(mutex_);
  if (step_.end_task(task) != StepMachine::TaskEnd::kOutermost) return;
  try {
    end_backward();
  } catch (...) {
    abandon_task(task);
    throw;
  }
}

void RootContext::abandon_task(int64_t task) noexcept {
  try {
    std::lock_guard lock(mutex_);
    const bool has_ended_badly = is_backward(step_.state()) && step_.task_count() == 0;
    if (step_.end_task(task) != StepMachine::TaskEnd::kOutermost && !has_ended_badly) return;
    const c10::OptionalStreamGuard on_theirs(stream_);  // autograd lets go of a task where any stream may be current
    for (auto* group : runner_.groups()) drop_unreduced(group->gradients());
    release_everything();
  } catch (const std::exception& error) {
    log().error("cleaning up after a failed backward failed: {}", error.what());
  }
}

void RootContext::gradient_arrived(ParamGroup& group, size_t index, const at::Tensor& unsharded_param) {
  std::lock_guard lock(mutex_);
  const auto& gradient = accumulated_grad(unsharded_param);
  require_state(!gradient.defined() || !gradient.requires_grad(),
                "{}: backward with create_graph leaves gradients with a history, which cannot be reduced over ranks; use "
                "torch::autograd::grad on the unsharded parameter for higher derivatives",
                group.params()[index].name());
  enter_phase(torch::autograd::get_current_graph_task_id(), {});
  group.gradients().streams.note(group.parts().config.device);
  group.gradients().store.arrived(index);
  // Inside a nested backward (checkpointing) more of the same may follow.
  if (step_.task_count() != 1 || !has_all_gradients(group)) return;
  runner_.on_last_gradient(group);
}

void RootContext::end_backward() {
  auto& trace = runner_.comm_ctx().trace;
  trace.look_for_listener();
  const Range range(trace, [] { return std::string("FSDP::root_post_backward_callback"); });
  runner_.start_reductions(runner_.scheduler().reduce_order().all());
  if (!step_.is_manual())
    runner_.reduce_left();
  else
    for (auto* group : runner_.groups()) fsdp::end_backward(group->gradients());
  if (step_.is_manual() || !options_.is_last_backward) {
    // More backwards follow: nobody reads the gradients yet, so nothing waits for them.
    runner_.scheduler().end_pass();
    if (in_step()) enter(step_.is_manual() ? StepEvent::kIsLeftDue : StepEvent::kStepEnds);  // not given up in a hook
    runner_.comm_ctx().trace.end_step();
    runner_.apply(runner_.scheduler().end_step(Scheduler::StepEnd::kMoreBackwards));
    tell_of_end();
  } else {
    runner_.reductions().finish();
    end_step();
  }
  note_left_gradients(*this, thread_);
  throw_faults(*this);
}

void RootContext::end_step() {
  runner_.scheduler().end_pass();
  close_step();
}

void RootContext::close_step(bool waits_for_copies) {
  const auto end = is_forward(step_.state()) ? Scheduler::StepEnd::kForward : Scheduler::StepEnd::kBackward;
  runner_.comm_ctx().meter.end_step();
  if (in_step()) enter(StepEvent::kStepEnds);
  runner_.comm_ctx().trace.end_step();
  runner_.ready().clear();
  if (waits_for_copies)
    for (auto* group : runner_.groups()) group->parts().shard.wait_for_copies();
  runner_.apply(runner_.scheduler().end_step(end));
  for (auto* group : runner_.groups()) group->unsharder().drop_post_forward_piece();
  runner_.comm_ctx().all_gather_stream.end_step();
  tell_of_end();
}

void RootContext::release_everything() {
  runner_.reductions().drop(nullptr);
  enter(StepEvent::kGivenUp);
  runner_.comm_ctx().trace.abandon_step();
  for (auto* group : runner_.groups()) group->gradients().store.reset();
  runner_.apply(runner_.scheduler().abandon());
  runner_.comm_ctx().all_gather_stream.end_step();
  for (auto* group : runner_.groups()) group->parts().shard.wait_for_copies();
  tell_of_end();
}

void RootContext::enter_scope() {
  std::lock_guard lock(mutex_);
  if (!step_.is_in_scope()) {
    if (!in_step())
      begin_forward();
    else if (is_forward(step_.state()))
      take_over_settings();
  }
  step_.enter_scope();  // only now: it may have thrown
}

void RootContext::leave_scope() noexcept {
  try {
    std::lock_guard lock(mutex_);
    step_.leave_scope();
    if (step_.is_in_scope() || !is_forward(step_.state()) || step_.records_autograd()) return;
    end_step();
  } catch (const std::exception& error) {
    log().error("ending a forward scope failed: {}", error.what());
  }
}

}  // namespace fsdp
