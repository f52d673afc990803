#include "fsdp/state_dict.hpp"

#include <unordered_set>

#include "api/state_dict/first_rank.hpp"
#include "api/state_dict/require_fits.hpp"
#include "api/state_dict/state_entry.hpp"
#include "base/require.hpp"
#include "tensor/broadcast_whole.hpp"

namespace fsdp {

namespace {

StateTensor tensor_of(const NamedState& state) {
  return {state.param ? plain_view(state.tensor) : state.tensor, state.param};
}

void require_values(const std::vector<NamedState>& states, std::string_view caller) {
  for (const auto& state : states)
    require_state(!state.param || !state.param->group->parts().config.device.is_meta(),
                  "{}: '{}' is on the meta device and has no values; materialise the module first",
                  caller, state.names.front());
}

/// What of a dict goes where.
struct LoadPlan {
  std::vector<const StateEntry*> sources;  // by state; null: left as it is
  IncompatibleKeys result;
};

const StateEntry* find_any(const StateDict& dict, const std::vector<std::string>& names) {
  for (const auto& name : names)
    if (const auto* entry = dict.find(name); entry != nullptr && entry->value.defined()) return entry;
  return nullptr;
}

LoadPlan plan_load(const std::vector<NamedState>& states, const StateDict& dict) {
  LoadPlan plan;
  std::unordered_set<std::string> known;
  std::unordered_set<const StateEntry*> used;
  for (const auto& state : states) {
    known.insert(state.names.begin(), state.names.end());
    const auto* entry = find_any(dict, state.names);
    used.insert(entry);
    if (entry == nullptr) plan.result.missing.push_back("'" + state.names.front() + "'");
    const auto wrong = entry != nullptr ? misfit(*entry, tensor_of(state)) : "";
    if (!wrong.empty()) plan.result.wrong.push_back("'" + state.names.front() + "' " + wrong);
    plan.sources.push_back(wrong.empty() ? entry : nullptr);
  }
  for (const auto& entry : dict.entries)
    if (!known.contains(entry.key()) && !used.contains(&entry.value()))
      plan.result.unexpected.push_back("'" + entry.key() + "'");
  return plan;
}

constexpr auto kLoadStateDict = "load_state_dict";

/// The first rank's plan, on all ranks. The sources are there alone.
IncompatibleKeys load_from_first(const std::vector<NamedState>& states, const StateDict& dict,
                           const LoadOptions& options, const LeadingMesh& leading) {
  const auto& mesh = leading.all;
  require(mesh.defined(), "{}: broadcast_from_rank0 needs a module with sharded parameters", kLoadStateDict);
  leading.require_all(states, kLoadStateDict);
  LoadPlan plan;
  std::vector<std::string> loads, refusal;
  if (is_first_rank(mesh)) {
    if (dict.kind != StateDictKind::kFull)
      refusal.push_back("broadcast_from_rank0 needs a full dict; make it with kind kFull");
    else
      plan = plan_load(states, dict);
    for (const auto* source : plan.sources) loads.push_back(source != nullptr ? "1" : "0");
  }
  const auto lists = unpack(broadcast_text(
      pack({refusal, loads, plan.result.missing, plan.result.unexpected, plan.result.wrong}), mesh,
      kLoadStateDict));
  require(lists[0].empty(), "{}: {}", kLoadStateDict, fmt::join(lists[0], ""));
  const IncompatibleKeys result{lists[2], lists[3], lists[4]};
  if (options.strict) require_fits(result, kLoadStateDict, "module");
  require(lists[1].size() == states.size(),
          "{}: the first rank's module has {} parameters and buffers, this rank's {}", kLoadStateDict,
          lists[1].size(), states.size());
  for (size_t i = 0; i < states.size(); ++i)
    if (lists[1][i] == "1")
      load_entry_from_first(plan.sources.empty() ? nullptr : plan.sources[i], tensor_of(states[i]),
                            mesh, states[i].names.front());
  return result;
}

}  // namespace

const StateEntry* StateDict::find(const std::string& name) const {
  if (const auto* entry = entries.find(name)) return entry;
  const auto other = other_names.find(name);
  return other == other_names.end() ? nullptr : entries.find(other->second);
}

void StateDict::insert(const std::string& name, at::Tensor value) {
  require(value.defined(), "StateDict: '{}' is an undefined tensor", name);
  auto sizes = value.sizes().vec();
  StateEntry entry{.value = std::move(value), .sizes = std::move(sizes)};
  if (auto* known = entries.find(name))
    *known = std::move(entry);
  else
    entries.insert(name, std::move(entry));
}

StateDict state_dict(const torch::nn::Module& module, const StateDictOptions& options) {
  constexpr auto kCaller = "state_dict";
  require(!options.rank0_only || options.kind == StateDictKind::kFull,
          "{}: rank0_only needs kind kFull; a sharded or local dict differs on every rank", kCaller);
  require_not_shown(module, kCaller);
  const auto states = named_states(module);
  require_values(states, kCaller);
  const auto leading = leading_mesh(module, states);
  StateDict dict;
  dict.kind = options.kind;
  for (const auto& state : states) {
    const bool keeps = !options.rank0_only || leading.keeps(state.param);
    auto entry = save_entry(tensor_of(state), options, keeps);
    if (!keeps) continue;
    if (state.dtype_before_cast) entry.value = entry.value.to(*state.dtype_before_cast);
    dict.entries.insert(state.names.front(), std::move(entry));
    for (size_t i = 1; i < state.names.size(); ++i)
      dict.other_names[state.names[i]] = state.names.front();
  }
  return dict;
}

IncompatibleKeys load_state_dict(torch::nn::Module& module, const StateDict& dict,
                           const LoadOptions& options) {
  require_not_shown(module, kLoadStateDict);
  const auto states = named_states(module);
  require_values(states, kLoadStateDict);
  if (options.broadcast_from_rank0)
    return load_from_first(states, dict, options, leading_mesh(module, states));
  auto plan = plan_load(states, dict);
  if (options.strict) require_fits(plan.result, kLoadStateDict, "module");
  for (size_t i = 0; i < states.size(); ++i)
    if (plan.sources[i] != nullptr) load_entry(*plan.sources[i], tensor_of(states[i]));
  return std::move(plan.result);
}

}  // namespace fsdp
