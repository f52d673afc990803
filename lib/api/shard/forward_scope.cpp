#include "fsdp/forward_scope.hpp"

#include "api/shard/open_scopes.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"

namespace fsdp {

namespace {

thread_local std::vector<ModuleState*> scopes;

at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  const bool casts = dtype && tensor.defined() && at::isFloatingType(tensor.scalar_type());
  return casts ? tensor.to(*dtype) : tensor;
}

}  // namespace

std::vector<std::weak_ptr<ModuleState>> open_scopes() {
  std::vector<std::weak_ptr<ModuleState>> open;
  for (auto* scope : scopes) open.push_back(scope->weak_from_this());
  return open;
}

ForwardScope::ForwardScope(const FSDPModule& root) : state_(handles::state(root).root()) {
  state_->context()->enter_scope();
  scopes.push_back(state_.get());
}

ForwardScope::~ForwardScope() {
  // The innermost of this root; none if the scope is left on another thread than it was entered on.
  const auto own = std::find(scopes.rbegin(), scopes.rend(), state_.get());
  if (own != scopes.rend()) scopes.erase(std::next(own).base());
  state_->context()->leave_scope();
}

at::Tensor cast_boundary_input(const FSDPModule& module, const at::Tensor& input) {
  const auto& policy = handles::state(module).request().options.mp_policy;
  const bool casts = policy.cast_forward_inputs && !handles::state(module).precision().computes_in_own_dtype();
  return casts ? cast(input, policy.param_dtype) : input;
}

at::Tensor cast_boundary_output(const FSDPModule& module, const at::Tensor& output) {
  return cast(output, handles::state(module).request().options.mp_policy.output_dtype);
}

}  // namespace fsdp
