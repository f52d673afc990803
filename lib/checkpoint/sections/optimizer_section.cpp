#include "checkpoint/sections/optimizer_section.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "api/state_dict/optimizer_fields.hpp"
#include "base/require.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/strict_json.hpp"
#include "checkpoint/plan/load_plan.hpp"
#include "checkpoint/sections/model_section.hpp"

namespace fsdp {

namespace {

using nlohmann::json;

constexpr auto kStep = "step";
constexpr int kDocumentDepth = 5;

/// State that an optimizer has with some of its options only: amsgrad, momentum, centered.
bool is_optional(const std::string& field) {
  return field == "max_exp_avg_sq" || field == "momentum_buffer" || field == "grad_avg";
}

std::string name_of(const OptimizerParam& param, const std::string& field) { return param.names.front() + "." + field; }

/// JSON has no infinities: they are texts.
json number_json(double value) { return std::isfinite(value) ? json(value) : json(fmt::format("{}", value)); }

double number_from(const json& value) {
  return value.is_string() ? std::strtod(value.get_ref<const std::string&>().c_str(), nullptr) : value.get<double>();
}

json option_json(const OptimizerOption& option) {
  if (const auto* flag = std::get_if<bool>(&option)) return *flag;
  if (const auto* number = std::get_if<double>(&option)) return number_json(*number);
  auto list = json::array();
  for (const double value : std::get<std::vector<double>>(option)) list.push_back(number_json(value));
  return list;
}

OptimizerOption option_from(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (!value.is_array()) return number_from(value);
  std::vector<double> numbers;
  for (const auto& item : value) numbers.push_back(number_from(item));
  return numbers;
}

/// A plain module's parameters() lists a tied one once for each of its names.
std::vector<OptimizerParam> distinct(std::vector<OptimizerParam> params) {
  std::set<const c10::TensorImpl*> known;
  std::erase_if(params, [&](const auto& param) { return !known.insert(param.tensor.unsafeGetTensorImpl()).second; });
  return params;
}

std::optional<StateFields> state_of(const torch::optim::Optimizer& optimizer, const OptimizerParam& param) {
  const auto state = optimizer.state().find(param.tensor.unsafeGetTensorImpl());
  if (state == optimizer.state().end()) return std::nullopt;
  return fields_of(*state->second);
}

/// Of the parameters of which the section has a tensor that this class has.
std::set<std::string> names_with_state(const OptimizerLoad::SavedSection& saved, const std::string& optimizer_class) {
  const auto empty = new_state(optimizer_class);
  const auto fields = *fields_of(*empty);
  std::set<std::string> known{kStep};
  for (const auto& [field, tensor] : fields.tensors) known.insert(field);
  std::set<std::string> names;
  for (const auto& [name, info] : saved.tensors)
    if (const auto dot = name.rfind('.'); dot != name.npos && known.contains(name.substr(dot + 1)))
      names.insert(name.substr(0, dot));
  return names;
}

SavedOptimizer::SavedGroup group_from(const json& saved) {
  require_checkpoint(saved.is_object(), "{}: a group is not an object", kOptimizerFile);
  SavedOptimizer::SavedGroup group;
  try {
    for (const auto& item : object_at(saved, "options", kOptimizerFile).items())
      // Python's optimizers have options that are unset, and some that these here do not have.
      if (!item.value().is_null()) group.options[item.key()] = option_from(item.value());
  } catch (const std::exception& error) {  // JSON's own among them
    group.fault = error.what();
  }
  return group;
}

SavedOptimizer optimizer_from(const std::string& text, const std::function<std::string(const std::string&)>& rename) {
  const auto document = parse_strict(text, kDocumentDepth, kOptimizerFile);
  require_checkpoint(document.is_object(), "{}: is not an object", kOptimizerFile);
  SavedOptimizer saved{.kept_in = SavedIn::kCheckpoint, .optimizer = string_at(document, "optimizer", kOptimizerFile)};
  for (const auto& group : array_at(document, "groups", kOptimizerFile)) {
    saved.groups.push_back(group_from(group));
    for (const auto& name : array_at(group, "params", kOptimizerFile)) {
      require_checkpoint(name.is_string(), "{}: a parameter's name is not a string", kOptimizerFile);
      saved.group_of[rename ? rename(name) : name.get<std::string>()] = saved.groups.size() - 1;
    }
  }
  return saved;
}

/// Returns this rank's tensor, into whose memory values can be loaded; undefined for an undefined tensor.
at::Tensor local_of(const at::Tensor& tensor) { return tensor.defined() ? to_local(tensor) : tensor; }

/// Gives `fields` their tensors: those that are there already, so that old and new are not both alive, else new ones.
std::vector<CheckpointTensor> wanted_tensors(const OptimizerParam& param, const std::string& name, const StateFields& fields,
                                             const std::optional<StateFields>& current,
                                             const OptimizerLoad::SavedSection& saved) {
  const auto like = param.param ? plain_view(param.tensor) : param.tensor.detach();
  std::vector<CheckpointTensor> wanted;
  for (size_t i = 0; i < fields.tensors.size(); ++i) {
    const auto& [field, tensor] = fields.tensors[i];
    if (is_optional(field) && !saved.tensors.contains(name + "." + field)) continue;
    const bool has_current = current && i < current->tensors.size() && current->tensors[i].first == field;
    const auto there = has_current ? local_of(*current->tensors[i].second) : at::Tensor();
    const bool is_there = there.defined() && there.sizes() == like.sizes();
    const auto local = is_there ? there : at::empty_like(like);
    *tensor = !param.param ? local : is_there && is_dtensor(*current->tensors[i].second) ? *current->tensors[i].second
                                                                                        : state_of(*param.param, local);
    wanted.push_back(spread_like(param.param, name + "." + field, local.detach()));
  }
  return wanted;
}

/// Makes a step counter in whichever dtype it was saved: Python's optimizers count in float32.
at::Tensor step_like_saved(const std::string& name, const OptimizerLoad::SavedSection& saved) {
  const auto found = saved.tensors.find(name);
  return at::zeros({}, found == saved.tensors.end() ? at::kLong : found->second.dtype);
}

}  // namespace

CheckpointSection optimizer_section(const std::vector<OptimizerParam>& params, const torch::optim::Optimizer& optimizer) {
  CheckpointSection section{"optimizer", {}};
  for (const auto& param : distinct(params)) {
    const bool has_state = optimizer.state().count(param.tensor.unsafeGetTensorImpl()) > 0;
    const auto fields = state_of(optimizer, param);
    require(fields.has_value() || !has_state,
            "save_checkpoint: '{}' has optimizer state of a class that is not known (known: {})", param.names.front(),
            kKnownOptimizers);
    if (!fields) continue;
    for (const auto& [field, tensor] : fields->tensors) {
      if (!tensor->defined()) continue;
      require(tensor->sizes() == param.tensor.sizes(),
              "save_checkpoint: the state '{}' of '{}' has sizes ({}), expected ({}) like its parameter", field,
              param.names.front(), fmt::join(tensor->sizes(), ", "), fmt::join(param.tensor.sizes(), ", "));
      const auto local = param.param ? own_state(*param.param, *tensor) : *tensor;
      section.tensors.push_back(spread_like(param.param, name_of(param, field), local.detach()));
    }
    if (fields->step != nullptr)
      section.tensors.push_back(spread_like({}, name_of(param, kStep), at::full({}, *fields->step, at::kLong)));
  }
  return section;
}

std::string optimizer_document(const std::vector<OptimizerParam>& params, const torch::optim::Optimizer& optimizer) {
  json document{{"optimizer", optimizer_class(optimizer, "save_checkpoint")}, {"groups", json::array()}};
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    json options = json::object(), names = json::array();
    for (const auto& [name, value] : read_options(optimizer.param_groups()[group].options()))
      options[name] = option_json(value);
    for (const auto& param : distinct(params))
      if (param.group == group) names.push_back(param.names.front());
    document["groups"].push_back({{"options", options}, {"params", names}});
  }
  return dump(document, "save_checkpoint: the optimizer");
}

std::string merge_optimizer_documents(const std::vector<std::string>& texts) {
  json merged;
  std::vector<std::set<json>> known;  // by group
  for (const auto& text : texts) {
    if (text.empty()) continue;
    auto document = json::parse(text);
    if (merged.is_null()) {
      for (const auto& group : document["groups"]) known.emplace_back(group["params"].begin(), group["params"].end());
      merged = std::move(document);
      continue;
    }
    require(document["optimizer"] == merged["optimizer"] && document["groups"].size() == known.size(),
            "save_checkpoint: the optimizer is {} with {} parameter groups on one rank, but {} with {} on a lower rank; use "
            "one class and one number of parameter groups on all ranks",
            document["optimizer"].dump(), document["groups"].size(), merged["optimizer"].dump(), known.size());
    for (size_t group = 0; group < known.size(); ++group)
      for (const auto& name : document["groups"][group]["params"])
        if (known[group].insert(name).second) merged["groups"][group]["params"].push_back(name);
    // Python's optimizers may have state that is no tensor.
    const auto values = document.value("values", json::object());
    for (const auto& item : values.items())
      if (!merged["values"].contains(item.key())) merged["values"][item.key()] = item.value();
  }
  return dump(merged, "save_checkpoint: the optimizer");
}

OptimizerLoad::OptimizerLoad(std::vector<OptimizerParam> params, torch::optim::Optimizer& optimizer, const SavedSection& saved,
                             const LoadCheckpointOptions& options)
    : params_(distinct(std::move(params))),
      optimizer_(optimizer),
      class_(optimizer_class(optimizer, "load_checkpoint")),
      is_strict_(options.strict),
      converts_(options.convert_dtypes) {
  if (!saved.document) {
    without_document_.missing.push_back(fmt::format("the optimizer ('{}')", kOptimizerFile));
    return;
  }
  auto found = optimizer_from(*saved.document, options.rename);
  found.with_state = names_with_state(saved, class_);
  found.take = [&](size_t position, const std::string& name, IncompatibleKeys& misfits) {
    return take(position, name, saved, misfits);
  };
  made_.resize(params_.size());
  plan_.emplace(params_, optimizer_, found);
}

bool OptimizerLoad::fits(const CheckpointTensor& tensor, const SavedSection& saved, IncompatibleKeys& misfits) const {
  const auto found = saved.tensors.find(tensor.name);
  if (found == saved.tensors.end()) {
    misfits.missing.push_back("'" + tensor.name + "'");
    return false;
  }
  const auto wrong = misfit(tensor, found->second.sizes, found->second.dtype, converts_);
  if (wrong.empty()) return true;
  misfits.wrong.push_back("'" + tensor.name + "' " + wrong);
  return false;
}

bool OptimizerLoad::take(size_t position, const std::string& name, const SavedSection& saved, IncompatibleKeys& misfits) {
  const auto& param = params_[position];
  MadeState made{.state = new_state(class_), .step = {}};
  const auto fields = *fields_of(*made.state);
  auto wanted = wanted_tensors(param, name, fields, state_of(optimizer_, param), saved);
  if (fields.step != nullptr) {
    made.step = step_like_saved(name + "." + kStep, saved);
    wanted.push_back(spread_like({}, name + "." + kStep, made.step));
  }
  if (!is_strict_) {
    bool fit = true;
    for (const auto& tensor : wanted) fit &= fits(tensor, saved, misfits);
    if (!fit) return false;
  }
  std::move(wanted.begin(), wanted.end(), std::back_inserter(section_.tensors));
  made_[position] = std::move(made);
  return true;
}

void OptimizerLoad::finish() {
  if (!is_planned()) return;
  plan_->apply([&](size_t position) {
    auto& made = made_[position];
    if (const auto fields = *fields_of(*made.state); fields.step != nullptr) *fields.step = made.step.item<int64_t>();
    return std::move(made.state);
  });
}

}  // namespace fsdp
