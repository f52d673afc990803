#include "api/shard/controlled_groups.hpp"

#include "module/handles.hpp"

namespace fsdp {

void FSDPModule::set_manual_backward_finalization(bool value) {
  root_context(*state_, "set_manual_backward_finalization").set_manual_finalization(value);
}

void FSDPModule::finalize_backward() { finalize_backward_async().wait(); }

GradientReductionHandle FSDPModule::finalize_backward_async() {
  const auto ticket = root_context(*state_, "finalize_backward").finalize_backward();
  return ticket == 0 ? GradientReductionHandle() : handles::reduction(state_, ticket);
}

void GradientReductionHandle::wait() {
  if (!root_) return;
  root_->context()->wait_for_gradients(ticket_);
  root_.reset();
}

}  // namespace fsdp
