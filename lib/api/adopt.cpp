#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "api/find_param.hpp"
#include "base/require.hpp"
#include "fsdp/parameters.hpp"
#include "param/residency.hpp"

// An optimizer built before fully_shard holds handles: the tensors whose gradients end elsewhere.
namespace fsdp {

namespace {

/// This rank's rows of a state tensor that has the whole parameter's sizes; others stay.
at::Tensor own_rows(const FoundParam& found, const at::Tensor& state) {
  const auto& param = found.param();
  if (!state.defined() || state.sizes() != c10::IntArrayRef(param.sizes())) return state;
  const auto& info = found.group->config().mesh_info;
  if (param.layout().is_whole()) return state;
  return param.layout().part_of(state, info.shard_rank()).clone();
}

template <class State, class... Fields>
bool cut(torch::optim::OptimizerParamState& state, const FoundParam& found, Fields... fields) {
  auto* known = dynamic_cast<State*>(&state);
  if (known == nullptr) return false;
  auto cut_field = [&](auto field) {
    auto& tensor = (known->*field)();
    tensor = own_rows(found, tensor);
  };
  (cut_field(fields), ...);
  return true;
}

using Getter = at::Tensor&;

bool cut_known_state(torch::optim::OptimizerParamState& state, const FoundParam& found) {
  using namespace torch::optim;
  auto tensor = [](auto getter) { return getter; };
  return cut<AdamWParamState>(
             state, found, tensor(static_cast<Getter (AdamWParamState::*)()>(&AdamWParamState::exp_avg)),
             tensor(static_cast<Getter (AdamWParamState::*)()>(&AdamWParamState::exp_avg_sq)),
             tensor(static_cast<Getter (AdamWParamState::*)()>(&AdamWParamState::max_exp_avg_sq))) ||
         cut<AdamParamState>(
             state, found, tensor(static_cast<Getter (AdamParamState::*)()>(&AdamParamState::exp_avg)),
             tensor(static_cast<Getter (AdamParamState::*)()>(&AdamParamState::exp_avg_sq)),
             tensor(static_cast<Getter (AdamParamState::*)()>(&AdamParamState::max_exp_avg_sq))) ||
         cut<SGDParamState>(state, found,
                            tensor(static_cast<Getter (SGDParamState::*)()>(
                                &SGDParamState::momentum_buffer))) ||
         cut<AdagradParamState>(
             state, found, tensor(static_cast<Getter (AdagradParamState::*)()>(&AdagradParamState::sum))) ||
         cut<RMSpropParamState>(
             state, found,
             tensor(static_cast<Getter (RMSpropParamState::*)()>(&RMSpropParamState::square_avg)),
             tensor(static_cast<Getter (RMSpropParamState::*)()>(&RMSpropParamState::momentum_buffer)),
             tensor(static_cast<Getter (RMSpropParamState::*)()>(&RMSpropParamState::grad_avg)));
}

/// Refuses before anything moves: half an optimizer's state must not be cut.
void check_states(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto found = find_param(parameter);
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (!found || !found->is_handle || state == optimizer.state().end()) continue;
      using namespace torch::optim;
      auto* base = state->second.get();
      const bool known = dynamic_cast<AdamWParamState*>(base) || dynamic_cast<AdamParamState*>(base) ||
                         dynamic_cast<SGDParamState*>(base) || dynamic_cast<AdagradParamState*>(base) ||
                         dynamic_cast<RMSpropParamState*>(base);
      require(known,
              "adopt: the optimizer has state for '{}' of a kind that cannot be cut to this rank's "
              "rows (known: AdamW, Adam, SGD, Adagrad, RMSprop); build it after fully_shard",
              found->param().name());
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
      if (!found || !found->is_handle) continue;
      const auto registered = found->param().registered();
      if (const auto state = states.find(parameter.unsafeGetTensorImpl()); state != states.end()) {
        auto value = std::move(state->second);
        states.erase(state);
        cut_known_state(*value, *found);
        states[registered.unsafeGetTensorImpl()] = std::move(value);
      }
      parameter = registered;
      ++moved;
    }
  return moved;
}

}  // namespace fsdp
