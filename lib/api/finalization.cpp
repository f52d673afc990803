#include "base/require.hpp"
#include "fsdp/fully_shard.hpp"
#include "module/module_state.hpp"

namespace fsdp {

namespace {
RootContext& context_of(ModuleState& state, const char* control) {
  require_state(state.is_root(), "{}: '{}' is not a root; call it on the root module", control,
                state.description);
  return *state.context;
}
}  // namespace

void FSDPModule::set_manual_backward_finalization(bool value) {
  context_of(*state_, "set_manual_backward_finalization").set_manual_finalization(value);
}

void FSDPModule::finalize_backward() { finalize_backward_async().wait(); }

GradientReductionHandle FSDPModule::finalize_backward_async() {
  const auto ticket = context_of(*state_, "finalize_backward").finalize_backward();
  return ticket == 0 ? GradientReductionHandle() : GradientReductionHandle(state_, ticket);
}

void GradientReductionHandle::wait() {
  if (!root_) return;
  root_->context->wait_for_gradients(ticket_);
  root_.reset();
}

}  // namespace fsdp
