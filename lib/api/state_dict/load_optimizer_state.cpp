#include <cstdlib>

#include "api/state_dict/first_rank.hpp"
#include "api/state_dict/optimizer_fields.hpp"
#include "api/state_dict/optimizer_params.hpp"
#include "api/state_dict/optimizer_plan.hpp"
#include "api/state_dict/require_fits.hpp"
#include "api/state_dict/state_entry.hpp"
#include "base/require.hpp"
#include "tensor/broadcast_whole.hpp"

// Loading an optimizer's state. First a plan says what goes where, without changing anything; it can
// travel from the first rank to the others; then it is carried out, one tensor at a time.
namespace fsdp {

namespace {

constexpr auto kLoadOptimizerState = "load_optimizer_state_dict";

/// What a dict has for one parameter that is to be loaded.
struct DictState {
  int64_t step = 0;
  std::string present = {};                     // by tensor of the class: '1' if it is defined
  std::vector<const StateEntry*> sources = {};  // of the present ones, on the rank that has the dict
};

struct DictPlan {
  OptimizerPlan::Decisions decisions = {};
  std::vector<DictState> states = {};  // by position
};

/// Returns why it does not fit; "": it does.
std::string read_state(DictState& read, const OptimizerStateDict::ParamState& saved, const OptimizerParam& param,
                       const std::string& optimizer_class) {
  const auto empty = new_state(optimizer_class);
  const auto fields = *fields_of(*empty);
  const StateTensor like{param.param ? plain_view(param.tensor) : param.tensor, param.param};
  size_t found = 0;
  for (const auto& [name, tensor] : fields.tensors) {
    const auto entry = saved.tensors.find(name);
    const bool is_there = entry != saved.tensors.end() && entry->second.value.defined();
    read.present += is_there ? '1' : '0';
    found += entry != saved.tensors.end();
    if (!is_there) continue;
    const auto wrong = misfit(entry->second, like);
    if (!wrong.empty()) return name + " " + wrong;
    read.sources.push_back(&entry->second);
  }
  if (found != saved.tensors.size()) return "has state that " + optimizer_class + " does not have";
  if (fields.step != nullptr && !saved.step) return "has no step counter";
  read.step = saved.step.value_or(0);
  return "";
}

SavedOptimizer saved_in(const OptimizerStateDict& dict) {
  SavedOptimizer saved{.kept_in = SavedIn::kDict, .keys = dict.keys, .optimizer = dict.optimizer};
  for (size_t group = 0; group < dict.groups.size(); ++group) {
    saved.groups.push_back({.options = dict.groups[group].options});
    for (const auto& key : dict.groups[group].params) {
      saved.group_of[key] = group;
      if (dict.state.contains(key)) saved.with_state.insert(key);
    }
  }
  return saved;
}

DictPlan plan_of(const OptimizerStateDict& dict, const std::vector<OptimizerParam>& params, torch::optim::Optimizer& optimizer,
                 const std::string& optimizer_class) {
  DictPlan plan;
  plan.states.resize(params.size());
  auto saved = saved_in(dict);
  saved.take = [&](size_t position, const std::string& key, IncompatibleKeys& misfits) {
    const auto wrong = read_state(plan.states[position], dict.state.at(key), params[position], optimizer_class);
    if (!wrong.empty()) misfits.wrong.push_back("'" + params[position].names.front() + "' " + wrong);
    return wrong.empty();
  };
  plan.decisions = OptimizerPlan(params, optimizer, saved).decisions();
  return plan;
}

// --- the plan as text, exact: numbers in hexadecimal

std::string option_text(const OptimizerOption& option) {
  struct {
    std::string operator()(double value) const { return fmt::format("d{:a}", value); }
    std::string operator()(bool value) const { return value ? "b1" : "b0"; }
    std::string operator()(const std::vector<double>& values) const {
      std::string text = "v";
      for (const double value : values) text += fmt::format("{:a};", value);
      return text;
    }
  } to_text;
  return std::visit(to_text, option);
}

OptimizerOption option_from(const std::string& text) {
  if (text[0] == 'b') return text[1] == '1';
  if (text[0] == 'd') return std::strtod(text.c_str() + 1, nullptr);
  std::vector<double> values;
  const char* at = text.c_str() + 1;
  while (*at != '\0') {
    char* end = nullptr;
    values.push_back(std::strtod(at, &end));
    at = end + 1;
  }
  return values;
}

std::string pack_plan(const DictPlan& plan, const std::vector<std::string>& refusal) {
  const auto& misfits = plan.decisions.misfits;
  std::vector<std::string> states;
  for (size_t i = 0; i < plan.states.size(); ++i)
    states.push_back(
        fmt::format("{}{} {}", static_cast<char>(plan.decisions.states[i]), plan.states[i].present, plan.states[i].step));
  std::vector<std::vector<std::string>> lists{refusal, misfits.missing, misfits.unexpected, misfits.wrong, states};
  for (const auto& group : plan.decisions.options) {
    auto& list = lists.emplace_back();
    for (const auto& [name, value] : group) list.push_back(name + "=" + option_text(value));
  }
  return pack(lists);
}

DictPlan unpack_plan(const std::string& text) {
  const auto lists = unpack(text);
  require(lists[0].empty(), "{}: {}", kLoadOptimizerState, fmt::join(lists[0], ""));
  DictPlan plan;
  plan.decisions.misfits = {lists[1], lists[2], lists[3]};
  for (const auto& item : lists[4]) {
    const auto space = item.find(' ');
    plan.decisions.states.push_back(OptimizerPlan::Fate{item[0]});
    plan.states.push_back({.step = std::strtoll(item.c_str() + space, nullptr, 10), .present = item.substr(1, space - 1)});
  }
  for (size_t i = 5; i < lists.size(); ++i) {
    auto& group = plan.decisions.options.emplace_back();
    for (const auto& item : lists[i]) {
      const auto equals = item.find('=');
      group[item.substr(0, equals)] = option_from(item.substr(equals + 1));
    }
  }
  return plan;
}

/// The first rank's plan on all ranks, the sources on the first alone.
template <class Plan>
DictPlan plan_from_first(const Plan& plan_here, StateDictKind kind, const DeviceMesh& mesh) {
  require(mesh.defined(), "{}: broadcast_from_rank0 needs a module with sharded parameters", kLoadOptimizerState);
  DictPlan own;
  std::vector<std::string> refusal;
  if (is_first_rank(mesh)) {
    if (kind == StateDictKind::kFull)
      own = plan_here();
    else
      refusal.push_back("broadcast_from_rank0 needs a full dict; make it with kind kFull");
  }
  auto plan = unpack_plan(broadcast_text(pack_plan(own, refusal), mesh, kLoadOptimizerState));
  for (size_t i = 0; i < own.states.size(); ++i) plan.states[i].sources = std::move(own.states[i].sources);
  return plan;
}

std::unique_ptr<torch::optim::OptimizerParamState> load_state(const DictState& saved, const OptimizerParam& param,
                                                              const std::string& optimizer_class,
                                                              const DeviceMesh* from_first) {
  auto state = new_state(optimizer_class);
  const auto fields = *fields_of(*state);
  if (fields.step != nullptr) *fields.step = saved.step;
  size_t next = 0;
  for (size_t i = 0; i < fields.tensors.size(); ++i) {
    if (saved.present[i] != '1') continue;
    const auto* source = next < saved.sources.size() ? saved.sources[next] : nullptr;
    ++next;
    const auto local = param.param ? plain_view(param.tensor) : param.tensor.detach();
    const StateTensor tensor{at::empty_like(local), param.param};
    if (from_first != nullptr)
      load_entry_from_first(source, tensor, *from_first, param.names.front());
    else
      load_entry(*source, tensor);
    *fields.tensors[i].second = param.param ? state_of(*param.param, tensor.local) : tensor.local;
  }
  return state;
}

}  // namespace

IncompatibleKeys load_optimizer_state_dict(const torch::nn::Module& module,
                                     torch::optim::Optimizer& optimizer,
                                     const OptimizerStateDict& dict, const LoadOptions& options) {
  require_not_shown(module, kLoadOptimizerState);
  const auto named = named_states(module);
  const auto params = optimizer_params(named, optimizer, kLoadOptimizerState);
  const auto optimizer_class = fsdp::optimizer_class(optimizer, kLoadOptimizerState);
  const auto leading = leading_mesh(module, named);
  const auto& mesh = leading.all;
  if (options.broadcast_from_rank0) leading.require_all(named, kLoadOptimizerState);
  const auto plan_here = [&] { return plan_of(dict, params, optimizer, optimizer_class); };
  const auto planned = options.broadcast_from_rank0 ? plan_from_first(plan_here, dict.kind, mesh) : plan_here();
  OptimizerPlan plan(params, optimizer, planned.decisions);
  if (options.strict) require_fits(plan.misfits(), kLoadOptimizerState, "optimizer");
  require(planned.states.size() == params.size(), "{}: the first rank's optimizer has {} parameters, this rank's {}",
          kLoadOptimizerState, planned.states.size(), params.size());
  plan.apply([&](size_t i) {
    return load_state(planned.states[i], params[i], optimizer_class, options.broadcast_from_rank0 ? &mesh : nullptr);
  });
  return plan.misfits();
}

}  // namespace fsdp
