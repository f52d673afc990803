#include "fsdp/full_parameters.hpp"

#include "api/params/full_parameter_scope.hpp"
#include "api/state_dict/named_states.hpp"
#include "module/module_path.hpp"

namespace fsdp {

FullParameters::FullParameters(torch::nn::Module& module, const FullParametersOptions& options)
    : shown_(std::make_unique<FullParameterScope>(
          module, options.recurse == Recurse::kYes ? ShowWhich::kTree : ShowWhich::kUnit, options)) {}

FullParameters::~FullParameters() = default;

namespace {

using NamedFunction = std::function<void(const std::string&, torch::nn::Module&)>;

void apply_below(torch::nn::Module& module, const std::string& name, const NamedFunction& function) {
  {
    FullParameterScope own(module, ShowWhich::kOwn, {});
    function(name, module);
  }
  for (const auto& child : module.named_children())
    if (child.value()) apply_below(*child.value(), join_path(name, child.key()), function);
}

}  // namespace

void apply(torch::nn::Module& module, const NamedFunction& function) {
  apply_below(module, "", function);
}

void apply(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& function) {
  apply_below(module, "", [&](const std::string&, torch::nn::Module& below) { function(below); });
}

}  // namespace fsdp
