#include "fsdp/optimizer_state_dict.hpp"

#include <set>

#include "api/state_dict/first_rank.hpp"
#include "api/state_dict/optimizer_fields.hpp"
#include "api/state_dict/optimizer_params.hpp"
#include "api/state_dict/state_entry.hpp"
#include "base/require.hpp"

namespace fsdp {

namespace {

constexpr auto kSave = "optimizer_state_dict";

std::string key_of(const OptimizerParam& param, size_t position, OptimizerKeys keys) {
  return keys == OptimizerKeys::kName ? param.names.front() : std::to_string(position);
}

std::vector<OptimizerStateDict::Group> save_groups(const torch::optim::Optimizer& optimizer,
                                                   const std::vector<OptimizerParam>& params,
                                                   OptimizerKeys keys) {
  std::vector<OptimizerStateDict::Group> groups;
  for (const auto& group : optimizer.param_groups())
    groups.push_back({.params = {}, .options = read_options(group.options())});
  std::set<std::string> known;  // a tied parameter may be there once for each of its names
  for (size_t i = 0; i < params.size(); ++i)
    if (auto key = key_of(params[i], i, keys); known.insert(key).second)
      groups[params[i].group].params.push_back(std::move(key));
  return groups;
}

std::optional<StateFields> fields_at(const torch::optim::Optimizer& optimizer,
                                     const OptimizerParam& param) {
  const auto state = optimizer.state().find(param.tensor.unsafeGetTensorImpl());
  if (state == optimizer.state().end()) return std::nullopt;
  auto fields = fields_of(*state->second);
  require(fields.has_value(), "{}: '{}' has state of a class that is not known (known: {})", kSave,
          param.names.front(), kKnownOptimizers);
  for (const auto& [name, tensor] : fields->tensors)
    require(!tensor->defined() || tensor->sizes() == param.tensor.sizes(),
            "{}: the state '{}' of '{}' has sizes ({}), expected ({}) like its parameter", kSave, name,
            param.names.front(), fmt::join(tensor->sizes(), ", "),
            fmt::join(param.tensor.sizes(), ", "));
  return fields;
}

/// Full state is gathered by all ranks in turn: they must have the same.
void require_same_state(const std::vector<OptimizerParam>& params,
                        const std::vector<std::optional<StateFields>>& states) {
  std::vector<ParamFact> facts;
  for (size_t i = 0; i < params.size(); ++i) {
    if (!params[i].param) continue;
    std::string fact;
    if (states[i])
      for (const auto& [name, tensor] : states[i]->tensors)
        fact += tensor->defined() ? name + " " + c10::toString(tensor->scalar_type()) + " " : "";
    facts.push_back({*params[i].param, fact});
  }
  require_same_facts(facts, kSave,
                     "the ranks have state for different parameters; see set_reduce_scatter_unused_params");
}

}  // namespace

OptimizerStateDict optimizer_state_dict(const torch::nn::Module& module,
                                        const torch::optim::Optimizer& optimizer,
                                        const OptimizerStateDictOptions& options) {
  require(!options.values.rank0_only || options.values.kind == StateDictKind::kFull,
          "{}: rank0_only needs kind kFull; a sharded or local dict differs on every rank", kSave);
  require_not_shown(module, kSave);
  const auto named = named_states(module);
  const auto params = optimizer_params(named, optimizer, kSave);
  OptimizerStateDict dict{.kind = options.values.kind,
                          .keys = options.keys,
                          .optimizer = optimizer_class(optimizer, kSave)};
  std::vector<std::optional<StateFields>> states;
  for (const auto& param : params) states.push_back(fields_at(optimizer, param));
  if (options.values.kind == StateDictKind::kFull) require_same_state(params, states);
  const auto leading = leading_mesh(module, named);
  bool keeps_any = false;
  std::set<const c10::TensorImpl*> saved_params;
  for (size_t i = 0; i < params.size(); ++i) {
    const bool keeps = !options.values.rank0_only || leading.keeps(params[i].param);
    keeps_any |= keeps;
    if (!states[i]) continue;
    if (options.keys == OptimizerKeys::kName && !saved_params.insert(params[i].tensor.unsafeGetTensorImpl()).second) continue;
    OptimizerStateDict::ParamState saved;
    if (states[i]->step != nullptr) saved.step = *states[i]->step;
    for (const auto& [name, tensor] : states[i]->tensors) {
      if (!tensor->defined()) continue;
      auto entry = save_entry({params[i].param ? own_state(*params[i].param, *tensor) : *tensor, params[i].param},
                              options.values, keeps);
      if (keeps) saved.tensors[name] = std::move(entry);
    }
    if (keeps) dict.state[key_of(params[i], i, options.keys)] = std::move(saved);
  }
  if (keeps_any) dict.groups = save_groups(optimizer, params, options.keys);
  return dict;
}

OptimizerStateDict rekey(OptimizerStateDict dict, OptimizerKeys keys, const torch::nn::Module& module,
                         const torch::optim::Optimizer& optimizer) {
  constexpr auto kCaller = "rekey";
  if (dict.keys == keys) return dict;
  const auto params = optimizer_params(named_states(module), optimizer, kCaller);
  std::map<std::string, std::vector<size_t>> positions;  // by old key; several of a tied parameter
  for (size_t i = 0; i < params.size(); ++i) {
    if (dict.keys == OptimizerKeys::kPosition) positions[std::to_string(i)] = {i};
    else for (const auto& name : params[i].names) positions[name].push_back(i);
  }
  const auto positions_of = [&](const std::string& key) -> const std::vector<size_t>& {
    const auto found = positions.find(key);
    require(found != positions.end(), "{}: the optimizer has no parameter '{}'", kCaller, key);
    return found->second;
  };
  size_t listed = 0;
  for (auto& group : dict.groups) {
    std::set<size_t> in_order;
    for (const auto& key : group.params) in_order.insert(positions_of(key).begin(), positions_of(key).end());
    listed += in_order.size();
    group.params.clear();
    std::set<std::string> known;
    for (const size_t i : in_order)
      if (auto key = key_of(params[i], i, keys); known.insert(key).second) group.params.push_back(std::move(key));
  }
  require(listed == params.size(), "{}: the dict lists {} parameters, the optimizer {}", kCaller, listed,
          params.size());
  std::map<std::string, OptimizerStateDict::ParamState> state;
  for (const auto& [key, value] : dict.state)
    for (const size_t i : positions_of(key)) state[key_of(params[i], i, keys)] = value;
  dict.state = std::move(state);
  dict.keys = keys;
  return dict;
}

}  // namespace fsdp
