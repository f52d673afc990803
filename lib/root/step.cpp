#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "group/group_sanitizer.hpp"
#include "group/reduce/reduce_call.hpp"
#include "root/facts_of.hpp"
#include "root/group_port.hpp"

// The boundaries of a step, and what happens to gradients at them.
namespace fsdp {

/// Queued in an autograd task as its last callback. If the task dies of an exception instead, the
/// callback is destroyed without having run: that is how a failed backward is noticed at once.
class RootContext::BackwardEnd {
 public:
  BackwardEnd(std::weak_ptr<RootContext> context, int64_t task)
      : context_(std::move(context)), task_(task) {}
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

namespace {

bool has_all_gradients(const ParamGroup& group) {
  // Ranks may use different parameters then: no rank may start a reduction because its own are
  // complete, or the order of collectives would depend on the data.
  return !group.reduction().reduces_unused_params && group.gradients().is_complete(group.trainable_count());
}

}  // namespace

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
  for (auto* group : comm_ctx_.groups) GroupPort::of(*group).mark_between_steps(was_in_step);
}

void RootContext::tell_of_beginning() const {
  if (const auto shows = follower.lock()) shows->take_over();
}

void RootContext::tell_of_end() const {
  if (const auto shows = follower.lock()) shows->show();
}

void RootContext::prepare_step(StepEvent begins) {
  step_.check(begins);
  apply(scheduler_.release_between_steps());  // what reads have left behind
  tell_of_beginning();
  recheck();
  throw_faults();
  has_started_ = true;  // a step that is refused has not begun
  comm_ctx_.all_gather_stream.begin_step();
  scheduler_.plan();
}

void RootContext::recheck() {
  if (on_step) on_step();
  for (auto* group : comm_ctx_.groups) {
    group->validate();
    group->sync_requires_grad();
    group->notes().say(*group);
    if (!group->unsharder().is_held()) continue;
    if (!group->parts().is_never_released() && group->is_stale()) tell(GroupEvent::kWritten, *group);
    group->sync_versions();
  }
}

/// Not before a backward: what a forward before it saved is in the dtype of that forward.
void RootContext::take_over_modes() {
  if (follow_modes && !in_step() && !steps_are_held()) follow_modes();
}

void RootContext::begin_forward() {
  take_over_modes();
  prepare_step(StepEvent::kForwardBegins);
  enter(StepEvent::kForwardBegins);
  comm_ctx_.meter.begin_step();
  scheduler_.begin_forward(at::GradMode::is_enabled());
  comm_ctx_.trace.note_first_values(take_first_values(comm_ctx_.groups));  // there are none but in the first
  comm_ctx_.trace.begin_phase(CollectiveTrace::Phase::kForward);
}

void RootContext::begin_backward(int64_t task) {
  const bool is_of_forward = in_step();
  if (!is_of_forward) {
    // A second backward over a retained graph: a step of its own, unless the one before is still to be reduced.
    const bool goes_on = !is_quiescent();
    prepare_step(StepEvent::kBackwardBegins);
    if (!goes_on) comm_ctx_.meter.begin_step();
  } else {
    tell_of_beginning();  // gradients may have been dropped since the forward
  }
  enter(StepEvent::kBackwardBegins);
  comm_ctx_.trace.begin_phase(CollectiveTrace::Phase::kBackward);
  reductions_.begin_backward();
  for (const int id : scheduler_.begin_backward(is_of_forward))
    if (auto* group = find(id); group != nullptr && group->is_stale()) tell(GroupEvent::kWritten, *group);
  for (const int id : scheduler_.current())
    if (auto* group = find(id)) GroupPort::of(*group).mark_not_ready();
  // Written between forward and backward: what autograd saved is out of date, and is to say so.
  for (auto* group : comm_ctx_.groups)
    if (group->unsharder().is_held()) group->sync_versions();
  watch_end_of(task);
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
    for (auto* group : comm_ctx_.groups) group->gradients().drop();
    release_everything();
  } catch (const std::exception& error) {
    log().error("giving up a failed backward: {}", error.what());
  }
}

void RootContext::gradient_arrived(ParamGroup& group, size_t index, const at::Tensor& unsharded_param) {
  std::lock_guard lock(mutex_);
  require_state(!unsharded_param.grad().defined() || !unsharded_param.grad().requires_grad(),
                "{}: backward with create_graph leaves gradients with a history, which cannot be "
                "reduced over ranks; use torch::autograd::grad on the module's own weight for higher "
                "derivatives",
                group.params()[index].name());
  enter_phase(torch::autograd::get_current_graph_task_id(), {});
  group.gradients().arrived(index);
  // Inside a nested backward (checkpointing) more of the same may follow.
  if (step_.task_count() != 1 || !has_all_gradients(group)) return;
  comm_ctx_.trace.look_for_listener();
  tell(GroupEvent::kLastGradient, group);
  reductions_.launch_behind_backward();
  if (!group.reduction().requires_gradient_sync) return;
  // Packed first: then its gradients are gone when the next parameters take their room. But packing waits for the buffers of
  // earlier reductions, and over a communicator of its own the gather need not.
  const bool gathers_first = group.reduction().uses_separate_group;
  const auto* gathered = gathers_first ? gather_before_reduce(group) : nullptr;
  auto reduction = pack_gradients(group);
  if (!gathers_first) gathered = gather_before_reduce(group);
  // Packing may have run a user's hooks, which may have read parameters.
  if (gathered != nullptr && (!scheduler_.orders().current().follows() || !is_unsharding(gathered->unsharder().state())))
    gathered = nullptr;
  const auto waits = hold_back(reduction, gathered);
  reductions_.launch_or_postpone(std::move(reduction), waits,
                                 waits == ReductionQueue::Waits::kForUse ? gathered : nullptr);
}

const ParamGroup* RootContext::gather_before_reduce(const ParamGroup& finished) {
  const auto [actions, first] = scheduler_.gather_before_reduce(finished.identity().id);
  apply(actions);
  return first == -1 ? nullptr : find(first);
}

ReduceJob RootContext::pack_gradients(ParamGroup& group) {
  comm_ctx_.trace.look_for_listener();
  reductions_.make_room(group);
  group.gradients().note_reduced();
  tell(GroupEvent::kReduced, group);
  group.optimizer_check().note_reduction(group.params()[0].name(), group.config().warn_after_reductions);
  return ReduceJob(group, reductions_.has_in_turn(group));
}

void RootContext::flush_gradients() {
  for (auto* group : comm_ctx_.groups) {
    const auto& config = group->reduction();
    const bool owes_zeros = config.requires_gradient_sync && config.reduces_unused_params &&
                            !group->gradients().is_reduced() && group->trainable_count() > 0;
    if (owes_zeros || has_gradients_to_reduce(*group)) {
      tell(GroupEvent::kLastGradient, *group);
      reductions_.launch(pack_gradients(*group));
    }
    if (!config.requires_gradient_sync) group->gradients().accumulate(group->gradient_dtypes());
    group->gradients().end_backward();
  }
}

void RootContext::end_backward() {
  comm_ctx_.trace.look_for_listener();
  reductions_.launch_postponed();
  if (step_.is_manual())
    leave_for_finalization();
  else
    flush_gradients();
  if (step_.is_manual() || !options_.is_last_backward) {
    // More backwards follow: nobody reads the gradients yet, so nothing waits for them.
    scheduler_.end_pass();
    if (in_step()) enter(step_.is_manual() ? StepEvent::kIsLeftDue : StepEvent::kStepEnds);  // not given up in a hook
    comm_ctx_.trace.end_step();
    apply(scheduler_.end_step(Scheduler::StepEnd::kMoreBackwards));
    tell_of_end();
  } else {
    reductions_.finish();
    end_step();
  }
  throw_faults();
}

void RootContext::throw_faults() {
  std::lock_guard lock(mutex_);
  // Not in a step: other ranks wait for what this one still has to launch.
  if (in_step()) return;
  std::vector<std::string> faults;
  for (auto* group : comm_ctx_.groups) {
    if (group->parts().sanitizer == nullptr) continue;
    for (auto& fault : group->parts().sanitizer->take_faults()) faults.push_back(std::move(fault));
  }
  require_state(faults.empty(), "the sanitizer found {} fault(s) on this rank:\n  {}", faults.size(),
                fmt::join(faults, "\n  "));
}

void RootContext::end_step() {
  scheduler_.end_pass();
  close_step();
}

void RootContext::close_step(bool waits_for_copies) {
  const auto end = is_forward(step_.state()) ? Scheduler::StepEnd::kForward : Scheduler::StepEnd::kBackward;
  comm_ctx_.meter.end_step();
  if (in_step()) enter(StepEvent::kStepEnds);
  comm_ctx_.trace.end_step();
  for (auto* group : comm_ctx_.groups) {
    if (waits_for_copies) group->parts().shard.wait_for_copies();
    GroupPort::of(*group).mark_not_ready();
  }
  apply(scheduler_.end_step(end));
  for (auto* group : comm_ctx_.groups) group->unsharder().drop_post_forward_piece();
  tell_of_end();
}

void RootContext::release_everything() {
  reductions_.drop(nullptr);
  enter(StepEvent::kGivenUp);
  comm_ctx_.trace.abandon_step();
  for (auto* group : comm_ctx_.groups) group->gradients().reset();
  apply(scheduler_.abandon());
  for (auto* group : comm_ctx_.groups) group->parts().shard.wait_for_copies();
  tell_of_end();
}

void RootContext::enter_scope() {
  std::lock_guard lock(mutex_);
  if (!is_in_scope() && !in_step()) begin_forward();
  step_.enter_scope();  // only now: it may have thrown
}

void RootContext::leave_scope() noexcept {
  try {
    std::lock_guard lock(mutex_);
    step_.leave_scope();
    if (is_in_scope() || !is_forward(step_.state()) || step_.records_autograd()) return;
    end_step();
  } catch (const std::exception& error) {
    log().error("leaving a forward scope: {}", error.what());
  }
}

}  // namespace fsdp
