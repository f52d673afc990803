#include "api/state_dict/optimizer_plan.hpp"

#include <optional>
#include <utility>

#include "base/require.hpp"

namespace fsdp {

namespace {

/// How texts name what was saved.
struct Words {
  const char *state, *optimizer, *group_with_options, *group_with_params, *missing_param;
};

const Words& words_of(SavedIn kept_in) {
  static constexpr Words kOfDict{"the dict", "the dict", "parameter group", "parameter group", ""};
  static constexpr Words kOfCheckpoint{"the optimizer's state", "the optimizer", "optimizer group", "the optimizer's group",
                                       "the optimizer's "};
  return kept_in == SavedIn::kDict ? kOfDict : kOfCheckpoint;
}

/// A parameter has several names where it is tied. The first one with state counts, as for the parameter's values the first
/// that has some.
std::optional<std::string> key_of(const OptimizerParam& param, size_t position, const SavedOptimizer& saved) {
  const auto keys = saved.keys == OptimizerKeys::kPosition ? std::vector{std::to_string(position)} : param.names;
  for (const auto& key : keys)
    if (saved.with_state.contains(key)) return key;
  for (const auto& key : keys)
    if (saved.group_of.contains(key)) return key;
  return std::nullopt;
}

}  // namespace

OptimizerPlan::OptimizerPlan(const std::vector<OptimizerParam>& params, torch::optim::Optimizer& optimizer,
                             const SavedOptimizer& saved)
    : params_(params), optimizer_(optimizer) {
  decisions_.states.assign(params.size(), Fate::kLeft);
  decide_class(saved);
  if (decisions_.is_refused) return;
  if (has_same_groups(saved)) decide_options(saved);
  decisions_.is_refused = saved.kept_in == SavedIn::kCheckpoint && !misfits().empty();
  if (decisions_.is_refused)
    decisions_.options.clear();
  else
    decide_states(saved);
}

bool OptimizerPlan::has_same_groups(const SavedOptimizer& saved) const {
  return saved.groups.size() == optimizer_.param_groups().size();
}

void OptimizerPlan::decide_class(const SavedOptimizer& saved) {
  const auto& words = words_of(saved.kept_in);
  const auto known = fsdp::optimizer_class(optimizer_, "");
  if (saved.optimizer != known) {
    decisions_.misfits.wrong.push_back(fmt::format("{} is {}'s, expected {}'s", words.state, saved.optimizer, known));
    decisions_.is_refused = true;
  }
  if (!has_same_groups(saved))
    decisions_.misfits.wrong.push_back(fmt::format("{} has {} parameter groups, expected {}", words.optimizer,
                                                   saved.groups.size(), optimizer_.param_groups().size()));
}

void OptimizerPlan::decide_options(const SavedOptimizer& saved) {
  for (size_t group = 0; group < saved.groups.size(); ++group) {
    const auto& options = saved.groups[group].options;
    auto fault = saved.groups[group].fault;
    auto copy = optimizer_.param_groups()[group].options().clone();
    try {
      if (fault.empty()) write_options(*copy, options);
    } catch (const UsageError& error) {
      fault = error.what();
    }
    if (!fault.empty())
      decisions_.misfits.wrong.push_back(fmt::format("{} {}: {}", words_of(saved.kept_in).group_with_options, group, fault));
    decisions_.options.push_back(read_options(*copy));
    // Python's optimizers have options that are unset.
    if (saved.kept_in == SavedIn::kCheckpoint) continue;
    for (const auto& [name, value] : decisions_.options.back())
      if (!options.contains(name)) decisions_.misfits.missing.push_back(fmt::format("'{}' of parameter group {}", name, group));
  }
}

OptimizerPlan::Fate OptimizerPlan::decide_state(size_t position, const std::string& key, const SavedOptimizer& saved) {
  const auto& param = params_[position];
  const bool has_state = saved.with_state.contains(key);
  if (!has_state && saved.kept_in == SavedIn::kCheckpoint) return Fate::kNone;
  const auto group = saved.group_of.find(key);
  if (has_same_groups(saved) && group != saved.group_of.end() && group->second != param.group) {
    decisions_.misfits.wrong.push_back(fmt::format("'{}' is in {} {}, expected {}", param.names.front(),
                                                   words_of(saved.kept_in).group_with_params, group->second, param.group));
    if (saved.kept_in == SavedIn::kDict) return Fate::kLeft;
  }
  if (!has_state) return Fate::kNone;
  return saved.take(position, key, decisions_.misfits) ? Fate::kLoaded : Fate::kLeft;
}

void OptimizerPlan::decide_states(const SavedOptimizer& saved) {
  std::set<std::string> used;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto key = key_of(params_[i], i, saved);
    if (!key) {
      decisions_.misfits.missing.push_back(
          fmt::format("{}'{}'", words_of(saved.kept_in).missing_param, params_[i].names.front()));
      continue;
    }
    used.insert(*key);
    decisions_.states[i] = decide_state(i, *key, saved);
  }
  if (saved.kept_in == SavedIn::kCheckpoint) return;
  for (const auto& [key, group] : saved.group_of)
    if (!used.contains(key)) decisions_.misfits.unexpected.push_back("'" + key + "'");
}

void OptimizerPlan::apply(const MakeState& make_state) {
  for (size_t group = 0; group < decisions_.options.size(); ++group)
    write_options(optimizer_.param_groups()[group].options(), decisions_.options[group]);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (decisions_.states[i] == Fate::kLeft) continue;
    auto* key = params_[i].tensor.unsafeGetTensorImpl();
    optimizer_.state().erase(key);
    if (decisions_.states[i] == Fate::kLoaded) optimizer_.state()[key] = make_state(i);
  }
}

}  // namespace fsdp
