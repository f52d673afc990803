#include "api/params/find_param.hpp"
#include "api/params/own_rows.hpp"
#include "api/state_dict/optimizer_fields.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "fsdp/parameters.hpp"

// An optimizer built before fully_shard holds unsharded parameters: the tensors whose gradients end elsewhere.
namespace fsdp {

namespace {

/// What this rank owns of a state tensor that has the whole parameter's sizes; others stay.
at::Tensor own_part(const FoundParam& found, const at::Tensor& state) {
  const bool is_whole = state.defined() && !is_dtensor(state) && state.sizes() == c10::IntArrayRef(found.param().spec.sizes());
  if (!is_whole) return state;
  return state_of(found, found.param().layout().is_whole() ? state : own_rows(found, state).clone());
}

/// Refuses before anything moves: half an optimizer's state must not be cut.
void check_states(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto found = find_param(parameter);
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (!found || !found->is_unsharded_param || state == optimizer.state().end()) continue;
      require(fields_of(*state->second).has_value(),
              "adopt: the optimizer's state for '{}' is of a class that cannot be sharded (known: {}); build the optimizer "
              "after fully_shard",
              found->param().name(), kKnownOptimizers);
    }
}

}  // namespace

int adopt(torch::optim::Optimizer& optimizer) {
  check_states(optimizer);
  BelowResidency below;
  int moved = 0;
  auto& states = optimizer.state();
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) {
      const auto found = find_param(parameter);
      if (!found || !found->is_unsharded_param) continue;
      const auto sharded_param = found->param().sharded_param();
      if (const auto state = states.find(parameter.unsafeGetTensorImpl()); state != states.end()) {
        auto value = std::move(state->second);
        states.erase(state);
        const auto fields = *fields_of(*value);
        for (const auto& [name, tensor] : fields.tensors) *tensor = own_part(*found, *tensor);
        states[sharded_param.unsafeGetTensorImpl()] = std::move(value);
      }
      parameter = sharded_param;
      ++moved;
    }
  return moved;
}

}  // namespace fsdp
