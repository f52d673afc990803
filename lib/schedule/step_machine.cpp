#include "schedule/step_machine.hpp"

#include <algorithm>

#include "base/require.hpp"

namespace fsdp {

void StepMachine::check(StepEvent event) const {
  const bool begins = event == StepEvent::kForwardBegins || event == StepEvent::kBackwardBegins;
  require_state(!begins || !is_pinned(),
                "full parameters are shown (fsdp::FullParameters), so no forward that records "
                "autograd, backward or scope of this module can begin; end that first");
  const char* error = transition(state_, event).error;
  require_state(error == nullptr, "{}", error != nullptr ? error : "");
}

void StepMachine::on(StepEvent event) {
  check(event);
  state_ = transition(state_, event).next;
  if (event == StepEvent::kForwardBegins) records_autograd_ = false;
  if (event == StepEvent::kFinalize) ++ticket_;
  if (event == StepEvent::kGivenUp) tasks_.clear();
}

bool StepMachine::has_task(int64_t task) const { return std::ranges::find(tasks_, task) != tasks_.end(); }

StepMachine::TaskEnd StepMachine::end_task(int64_t task) {
  const auto position = std::ranges::find(tasks_, task);
  if (position == tasks_.end()) return TaskEnd::kUnknown;
  const bool is_outermost = position == tasks_.begin();
  tasks_.erase(position, tasks_.end());
  return is_outermost ? TaskEnd::kOutermost : TaskEnd::kNested;
}

void StepMachine::set_manual_finalization(bool value) {
  if (value == is_manual_) return;
  require_state((state_ == StepState::kIdle || state_ == StepState::kForward) && tasks_.empty(),
                "set_manual_backward_finalization: a backward is under way or not finalized; call "
                "finalize_backward (and wait for it) or reset_iter_state first");
  is_manual_ = value;
}

void StepMachine::check_ticket(int64_t ticket) const {
  check(StepEvent::kWaitedFor);
  require_state(ticket == ticket_, "{}", detail::kDropped.error);
}

}  // namespace fsdp
