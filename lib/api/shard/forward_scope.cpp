#include "fsdp/forward_scope.hpp"

#include <torch/csrc/autograd/graph_task.h>

#include "api/shard/open_scopes.hpp"
#include "base/side_stream.hpp"
#include "dispatch/operand_cast.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"

namespace fsdp {

namespace {

thread_local std::vector<ModuleState*> scopes;

at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  return dtype ? cast_floating(tensor, *dtype) : tensor;
}

/// Of an exempt module: what its parameters are in; none if it has none that are floating-point.
std::optional<at::ScalarType> own_dtype(const ModuleState& state) {
  for (const auto& group : state.live_groups())
    for (const auto& param : group->params())
      if (at::isFloatingType(param.spec.param_dtype)) return param.spec.param_dtype;
  return std::nullopt;
}

/// For each of the module's parameters what operators on it cast their results to.
template <class Visit>
void for_output_dtypes(const ModuleState& state, const Visit& visit) {
  for (const auto& group : state.live_groups())
    for (auto& param : group->parts().params) visit(param.spec.output_dtype);
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

namespace detail {

std::optional<c10::Device> input_device(const FSDPModule& module) {
  auto& state = handles::state(module);
  const auto device = state.request().mesh_info.mesh.device();
  if (!SideStream::exists_on(device)) return std::nullopt;
  const auto root = state.root();
  // What runs once more in a backward (activation checkpointing) gets what it got. Below a root that was not moved.
  const bool is_below_again = torch::autograd::get_current_graph_task_id() != -1 && root.get() != &state;
  return root->context()->step().is_in_scope() || is_below_again ? std::nullopt : std::optional(device);
}

BoundaryScope::BoundaryScope(const FSDPModule& module) {
  if (!handles::state(module).request().is_exempt) return;
  state_ = handles::shared_state(module);
  for_output_dtypes(*state_, [this](auto& dtype) { output_dtypes_.push_back(std::exchange(dtype, std::nullopt)); });
}

BoundaryScope::~BoundaryScope() {
  if (!state_) return;
  size_t next = 0;
  for_output_dtypes(*state_, [&](auto& dtype) { dtype = output_dtypes_[next++]; });
}

}  // namespace detail

at::Tensor cast_boundary_input(const FSDPModule& module, const at::Tensor& input) {
  auto& state = handles::state(module);
  const auto& policy = state.request().options.mp_policy;
  if (!policy.cast_forward_inputs || state.precision().computes_in_own_dtype()) return input;
  return cast(input, state.request().is_exempt ? own_dtype(state) : policy.param_dtype);
}

at::Tensor cast_boundary_output(const FSDPModule& module, const at::Tensor& output) {
  auto& state = handles::state(module);
  const auto& policy = state.request().options.mp_policy;
  const bool goes_back = state.request().is_exempt && policy.cast_forward_inputs && !policy.output_dtype &&
                         !state.precision().computes_in_own_dtype();
  return cast(output, goes_back ? policy.param_dtype : policy.output_dtype);
}

}  // namespace fsdp
