#include "fsdp/forward_scope.hpp"

#include "module/module_state.hpp"

namespace fsdp {

namespace {
at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  const bool casts = dtype && tensor.defined() && at::isFloatingType(tensor.scalar_type());
  return casts ? tensor.to(*dtype) : tensor;
}
}  // namespace

ForwardScope::ForwardScope(const FSDPModule& root) : state_(root.state().root()) {
  state_->context->enter_scope();
}

ForwardScope::~ForwardScope() { state_->context->leave_scope(); }

at::Tensor cast_boundary_input(const FSDPModule& module, const at::Tensor& input) {
  const auto& policy = module.state().mp_policy;
  return policy.cast_forward_inputs ? cast(input, policy.param_dtype) : input;
}

at::Tensor cast_boundary_output(const FSDPModule& module, const at::Tensor& output) {
  return cast(output, module.state().mp_policy.output_dtype);
}

}  // namespace fsdp
