#include "api/state_dict/optimizer_params.hpp"

#include <unordered_map>

#include "api/state_dict/optimizer_fields.hpp"
#include "base/require.hpp"

namespace fsdp {

std::vector<OptimizerParam> optimizer_params(const std::vector<NamedState>& states,
                                             const torch::optim::Optimizer& optimizer,
                                             std::string_view caller) {
  std::unordered_map<const c10::TensorImpl*, const NamedState*> known;
  for (const auto& state : states) known[state.tensor.unsafeGetTensorImpl()] = &state;
  std::vector<OptimizerParam> params;
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group)
    for (const auto& tensor : optimizer.param_groups()[group].params()) {
      const auto found = known.find(tensor.unsafeGetTensorImpl());
      if (found == known.end()) {
        const auto param = find_param(tensor);
        require(!param || !param->is_unsharded_param,
                "{}: the optimizer holds the unsharded parameter '{}' (the tensor of a module's member) instead of the sharded "
                "one; call fsdp::adopt(optimizer)",
                caller, param ? param->param().name() : "");
        throw UsageError(fmt::format(
            "{}: parameter {} of the optimizer, of sizes ({}), is not one of the module's; pass the module that the optimizer "
            "was built for", caller,
            params.size(), fmt::join(tensor.sizes(), ", ")));
      }
      params.push_back({tensor, found->second->param, found->second->names, group});
    }
  return params;
}

std::string optimizer_class(const torch::optim::Optimizer& optimizer, std::string_view caller) {
  const auto& groups = optimizer.param_groups();
  const auto options = groups.empty() ? nullptr : groups.front().options().clone();
  const auto known = options ? fields_of(*options) : std::nullopt;
  require(known.has_value(), "{}: expected one of LibTorch's {}, found another optimizer", caller,
          kKnownOptimizers);
  return known->optimizer;
}

namespace {

struct ReadField {
  OptimizerOption operator()(const double* field) const { return *field; }
  OptimizerOption operator()(const bool* field) const { return *field; }
  OptimizerOption operator()(const std::tuple<double, double>* field) const {
    return std::vector<double>{std::get<0>(*field), std::get<1>(*field)};
  }
};

struct WriteField {
  const OptimizerOption& value;
  bool operator()(double* field) const {
    const auto* number = std::get_if<double>(&value);
    if (number != nullptr) *field = *number;
    return number != nullptr;
  }
  bool operator()(bool* field) const {
    const auto* flag = std::get_if<bool>(&value);
    if (flag != nullptr) *field = *flag;
    return flag != nullptr;
  }
  bool operator()(std::tuple<double, double>* field) const {
    const auto* pair = std::get_if<std::vector<double>>(&value);
    if (pair == nullptr || pair->size() != 2) return false;
    *field = {(*pair)[0], (*pair)[1]};
    return true;
  }
};

}  // namespace

std::map<std::string, OptimizerOption> read_options(const torch::optim::OptimizerOptions& options) {
  const auto copy = options.clone();
  const auto known = *fields_of(*copy);
  std::map<std::string, OptimizerOption> values;
  for (const auto& [name, field] : known.fields) values[name] = std::visit(ReadField{}, field);
  return values;
}

void write_options(torch::optim::OptimizerOptions& options,
                   const std::map<std::string, OptimizerOption>& values) {
  const auto known = *fields_of(options);
  for (const auto& [name, field] : known.fields)
    if (const auto value = values.find(name); value != values.end())
      require(std::visit(WriteField{value->second}, field),
              "optimizer option '{}': the value has another type than the option", name);
}

}  // namespace fsdp
