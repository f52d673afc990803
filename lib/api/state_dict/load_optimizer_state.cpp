#include <cstdlib>
#include <set>

#include "api/state_dict/first_rank.hpp"
#include "api/state_dict/require_fits.hpp"
#include "api/state_dict/optimizer_fields.hpp"
#include "api/state_dict/optimizer_params.hpp"
#include "api/state_dict/state_entry.hpp"
#include "base/require.hpp"
#include "tensor/broadcast_whole.hpp"

// Loading an optimizer's state. First a plan says what goes where, without changing anything; it can
// travel from the first rank to the others; then it is carried out, one tensor at a time.
namespace fsdp {

namespace {

constexpr auto kLoadOptimizerState = "load_optimizer_state_dict";

struct PlannedState {
  bool is_left = true;      // as it is: the dict does not say, or says what does not fit
  bool has_state = false;   // else: there is none afterwards
  int64_t step = 0;
  std::string present;      // by tensor of the class: '1' if it is defined
  std::vector<const StateEntry*> sources = {};  // of the present ones, on the rank that has the dict
};

struct OptimizerPlan {
  std::vector<PlannedState> states;                            // by position
  std::vector<std::map<std::string, OptimizerOption>> options;  // by group; empty: left as they are
  IncompatibleKeys result;
};

class OptimizerStatePlanner {
 public:
  OptimizerStatePlanner(const std::vector<OptimizerParam>& params, const torch::optim::Optimizer& optimizer,
          const OptimizerStateDict& dict)
      : params_(params), optimizer_(optimizer), dict_(dict) {}

  OptimizerPlan run(const std::string& optimizer_class) {
    plan_.states.resize(params_.size());
    class_ = optimizer_class;
    if (dict_.optimizer != optimizer_class) {
      plan_.result.wrong.push_back(fmt::format("the dict is {}'s, expected {}'s", dict_.optimizer,
                                               optimizer_class));
      return std::move(plan_);
    }
    for (size_t group = 0; group < dict_.groups.size(); ++group)
      for (const auto& key : dict_.groups[group].params) groups_of_dict_[key] = group;
    same_groups_ = dict_.groups.size() == optimizer_.param_groups().size();
    if (!same_groups_)
      plan_.result.wrong.push_back(fmt::format("the dict has {} parameter groups, expected {}",
                                               dict_.groups.size(),
                                               optimizer_.param_groups().size()));
    for (size_t i = 0; i < params_.size(); ++i) plan_param(i);
    for (const auto& [key, group] : groups_of_dict_)
      if (!used_.contains(key)) plan_.result.unexpected.push_back("'" + key + "'");
    if (same_groups_) plan_options();
    return std::move(plan_);
  }

 private:
  /// The key that the dict has for a parameter; none: nullopt.
  std::optional<std::string> key_of(size_t position) const {
    const auto& names = params_[position].names;
    if (dict_.keys == OptimizerKeys::kPosition) {
      auto key = std::to_string(position);
      return groups_of_dict_.contains(key) ? std::optional(key) : std::nullopt;
    }
    for (const auto& name : names)
      if (groups_of_dict_.contains(name)) return name;
    return std::nullopt;
  }

  void plan_param(size_t position) {
    const auto& param = params_[position];
    const auto& name = param.names.front();
    const auto key = key_of(position);
    if (!key) {
      plan_.result.missing.push_back("'" + name + "'");
      return;
    }
    used_.insert(*key);
    const auto group = groups_of_dict_.at(*key);
    if (same_groups_ && group != param.group) {
      plan_.result.wrong.push_back(
          fmt::format("'{}' is in parameter group {}, expected {}", name, group, param.group));
      return;
    }
    auto& planned = plan_.states[position];
    const auto saved = dict_.state.find(*key);
    if (saved == dict_.state.end()) {
      planned.is_left = false;
      return;
    }
    const auto wrong = plan_tensors(planned, saved->second, param);
    planned.is_left = !wrong.empty();
    if (!wrong.empty()) plan_.result.wrong.push_back("'" + name + "' " + wrong);
  }

  std::string plan_tensors(PlannedState& planned, const OptimizerStateDict::ParamState& saved,
                           const OptimizerParam& param) const {
    const auto empty = new_state(class_);
    const auto fields = *fields_of(*empty);
    const StateTensor like{param.param ? plain_view(param.tensor) : param.tensor, param.param};
    size_t found = 0;
    for (const auto& [name, tensor] : fields.tensors) {
      const auto entry = saved.tensors.find(name);
      const bool is_there = entry != saved.tensors.end() && entry->second.value.defined();
      planned.present += is_there ? '1' : '0';
      found += entry != saved.tensors.end();
      if (!is_there) continue;
      const auto wrong = misfit(entry->second, like);
      if (!wrong.empty()) return name + " " + wrong;
      planned.sources.push_back(&entry->second);
    }
    if (found != saved.tensors.size()) return "has state that " + class_ + " does not have";
    if (fields.step != nullptr && !saved.step) return "has no step counter";
    planned.step = saved.step.value_or(0);
    planned.has_state = true;
    return "";
  }

  void plan_options() {
    for (size_t group = 0; group < dict_.groups.size(); ++group) {
      auto copy = optimizer_.param_groups()[group].options().clone();
      try {
        write_options(*copy, dict_.groups[group].options);
      } catch (const UsageError& error) {
        plan_.result.wrong.push_back(fmt::format("parameter group {}: {}", group, error.what()));
      }
      for (const auto& [name, value] : read_options(*copy))
        if (!dict_.groups[group].options.contains(name))
          plan_.result.missing.push_back(fmt::format("'{}' of parameter group {}", name, group));
      plan_.options.push_back(read_options(*copy));
    }
  }

  const std::vector<OptimizerParam>& params_;
  const torch::optim::Optimizer& optimizer_;
  const OptimizerStateDict& dict_;
  std::string class_;
  std::map<std::string, size_t> groups_of_dict_;  // by key
  std::set<std::string> used_;
  bool same_groups_ = false;
  OptimizerPlan plan_;
};

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

std::string pack_plan(const OptimizerPlan& plan, const std::vector<std::string>& refusal) {
  std::vector<std::string> states;
  for (const auto& state : plan.states)
    states.push_back(fmt::format("{}{} {}", state.is_left ? 'l' : state.has_state ? 's' : 'n',
                                 state.present, state.step));
  std::vector<std::vector<std::string>> lists{refusal, plan.result.missing, plan.result.unexpected,
                                              plan.result.wrong, states};
  for (const auto& group : plan.options) {
    auto& list = lists.emplace_back();
    for (const auto& [name, value] : group) list.push_back(name + "=" + option_text(value));
  }
  return pack(lists);
}

OptimizerPlan unpack_plan(const std::string& text) {
  const auto lists = unpack(text);
  require(lists[0].empty(), "{}: {}", kLoadOptimizerState, fmt::join(lists[0], ""));
  OptimizerPlan plan;
  plan.result = {lists[1], lists[2], lists[3]};
  for (const auto& item : lists[4]) {
    const auto space = item.find(' ');
    plan.states.push_back({.is_left = item[0] == 'l',
                           .has_state = item[0] == 's',
                           .step = std::strtoll(item.c_str() + space, nullptr, 10),
                           .present = item.substr(1, space - 1)});
  }
  for (size_t i = 5; i < lists.size(); ++i) {
    auto& group = plan.options.emplace_back();
    for (const auto& item : lists[i]) {
      const auto equals = item.find('=');
      group[item.substr(0, equals)] = option_from(item.substr(equals + 1));
    }
  }
  return plan;
}

/// The first rank's plan on all ranks, the sources on the first alone.
OptimizerPlan plan_from_first(OptimizerStatePlanner planner, const OptimizerStateDict& dict,
                              const std::string& optimizer_class, const DeviceMesh& mesh) {
  require(mesh.defined(), "{}: broadcast_from_rank0 needs a module with sharded parameters", kLoadOptimizerState);
  OptimizerPlan own;
  std::vector<std::string> refusal;
  if (is_first_rank(mesh)) {
    if (dict.kind == StateDictKind::kFull)
      own = planner.run(optimizer_class);
    else
      refusal.push_back("broadcast_from_rank0 needs a full dict; make it with kind kFull");
  }
  auto plan = unpack_plan(broadcast_text(pack_plan(own, refusal), mesh, kLoadOptimizerState));
  for (size_t i = 0; i < own.states.size(); ++i)
    plan.states[i].sources = std::move(own.states[i].sources);
  return plan;
}

std::unique_ptr<torch::optim::OptimizerParamState> load_state(const PlannedState& planned,
                                                              const OptimizerParam& param,
                                                              const std::string& optimizer_class,
                                                              const DeviceMesh* from_first) {
  auto state = new_state(optimizer_class);
  const auto fields = *fields_of(*state);
  if (fields.step != nullptr) *fields.step = planned.step;
  size_t next = 0;
  for (size_t i = 0; i < fields.tensors.size(); ++i) {
    if (planned.present[i] != '1') continue;
    const auto* source = next < planned.sources.size() ? planned.sources[next] : nullptr;
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
  OptimizerStatePlanner planner(params, optimizer, dict);
  const auto plan = options.broadcast_from_rank0
                        ? plan_from_first(std::move(planner), dict, optimizer_class, mesh)
                        : planner.run(optimizer_class);
  if (options.strict) require_fits(plan.result, kLoadOptimizerState, "optimizer");
  require(plan.states.size() == params.size(),
          "{}: the first rank's optimizer has {} parameters, this rank's {}", kLoadOptimizerState,
          plan.states.size(), params.size());
  for (size_t group = 0; group < plan.options.size(); ++group)
    write_options(optimizer.param_groups()[group].options(), plan.options[group]);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& planned = plan.states[i];
    auto* key = params[i].tensor.unsafeGetTensorImpl();
    if (planned.is_left) continue;
    optimizer.state().erase(key);  // first, so that old and new are not both alive
    if (planned.has_state)
      optimizer.state()[key] = load_state(planned, params[i], optimizer_class,
                                          options.broadcast_from_rank0 ? &mesh : nullptr);
  }
  return plan.result;
}

}  // namespace fsdp
