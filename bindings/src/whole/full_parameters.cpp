#include "whole/full_parameters.hpp"

#include <fmt/format.h>

#include <unordered_set>

#include "base/log.hpp"
#include "fsdp/error.hpp"
#include "root/find_param.hpp"
#include "shown/shown_registry.hpp"
#include "whole/known_mirrors.hpp"

namespace fsdp::python {

namespace {

using Shown = std::vector<std::shared_ptr<ShownParam>>;

bool is_full(const ShownParam& shown) {
  const auto found = find_param(shown.sharded().local_tensor());
  const auto* storage = found ? found->param().unsharded.storage() : nullptr;
  return storage != nullptr && storage->is_set_aside();
}

/// What the core is to see: as the user has left it.
void take_over(const Shown& params, bool with_grads) {
  for (const auto& param : params)
    if (const auto user = param->user()) {
      user->before_use(ParamUser::Use::kOperator);
      user->before_use(ParamUser::Use::kAll);
    }
  for (const auto& param : params) {
    if (param->sharded().holds_subclass())
      throw UsageError("FullParameters: parameter '" + param->forms().entries().name() +
                       "' has fsdp_pre_all_gather, so that only its tensor subclass can gather the whole value; "
                       "gather it with its DTensor's full_tensor()");
    if (with_grads && param->forms().computes_with_handle())
      throw UsageError("FullParameters: with_grads is not for a tensor-parallel parameter, such as '" +
                       param->forms().entries().name() + "'; read the gradient of its DTensor");
    param->take_over();
  }
}

}  // namespace

FullScope::FullScope(const py::handle& module, const FullParametersOptions& options) : writeback_(options.writeback) {
  const bool recurses = options.recurse == Recurse::kYes;
  const auto mirrors = known_mirrors(module, recurses);
  const auto candidates = params_below(mirrors);
  take_over(candidates, options.with_grads);
  std::unordered_set<const ShownParam*> full_before;
  for (const auto& param : candidates)
    if (is_full(*param)) full_before.insert(param.get());
  {
    py::gil_scoped_release no_gil;
    for (const auto& mirror : mirrors) scopes_.push_back(std::make_unique<FullParameters>(*mirror, options));
  }
  for (const auto& param : candidates)
    if (!full_before.contains(param.get()) && is_full(*param)) shown_.push_back(param);
  try {
    for (const auto& param : shown_) param->forms().show_full();
  } catch (...) {
    end();
    throw;
  }
}

FullScope::~FullScope() {
  py::gil_scoped_acquire gil;
  try {
    end();
  } catch (const std::exception& error) {
    log().error("{}", error.what());
  }
}

/// `module.weight = nn.Parameter(...)`, load_state_dict(assign=True): a write like any other. Returns what is wrong.
std::string FullScope::take_over_replaced() const {
  std::string wrong;
  at::NoGradGuard no_grad;
  for (const auto& param : shown_) {
    const auto replacement = param->forms().in_place_of_full();
    if (!replacement.defined()) continue;
    auto whole = tensor_of(param->forms().unsharded().object());
    if (replacement.sizes() == whole.sizes())
      whole.copy_(replacement);
    else
      wrong += fmt::format("FullParameters: expected parameter '{}' to have the sizes {}, found a replacement of sizes {}, "
                           "which was dropped. ",
                           param->forms().entries().name(), fmt::join(whole.sizes(), "x"), fmt::join(replacement.sizes(), "x"));
  }
  return wrong;
}

void FullScope::end() {
  const auto wrong = writeback_ ? take_over_replaced() : std::string();
  const auto shown = std::exchange(shown_, {});
  {
    py::gil_scoped_release no_gil;
    scopes_.clear();
  }
  for (const auto& param : shown) {
    param->forms().end_full();
    follow_home(*param);
    param->show_gradient();
  }
  if (!wrong.empty()) throw UsageError(wrong);
}

void define_full_parameters(py::module_& module) {
  py::class_<FullScope> scope(module, "FullScope");
  not_made_by_python(scope).def("end", &FullScope::end);
  module.def("full_parameters", [](const py::handle& root, bool recurse, bool writeback, bool rank0_only, bool offload_to_cpu,
                                   bool with_grads) {
    return std::make_unique<FullScope>(root, FullParametersOptions{.recurse = recurse ? Recurse::kYes : Recurse::kNo,
                                                                   .writeback = writeback,
                                                                   .rank0_only = rank0_only,
                                                                   .offload_to_cpu = offload_to_cpu,
                                                                   .with_grads = with_grads});
  });
}

}  // namespace fsdp::python
