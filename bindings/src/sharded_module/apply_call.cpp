#include "sharded_module/apply_call.hpp"

#include <ATen/core/grad_mode.h>

#include <unordered_set>
#include <utility>

namespace fsdp::python {

namespace {

/// What the function has made of a gradient: values. In dtype and device the gradient follows its group.
struct AppliedGradient {
  ShownParam* param;
  at::Tensor local;
};

std::vector<AppliedGradient> apply_to_gradients(const ShownParams& params, const py::object& function, const py::object& of) {
  std::vector<AppliedGradient> applied;
  if (function.is_none()) return applied;
  std::unordered_set<PyObject*> asked;
  for (const auto& parameter : of) asked.insert(parameter.ptr());
  at::NoGradGuard no_grad;
  for (const auto& param : params.all()) {
    const auto& gradient = param->gradient().aside();
    if (!gradient.defined() || !asked.contains(param->forms().entries().now())) continue;
    const auto shown = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
    const auto made = function(shown);
    if (!THPVariable_Check(made.ptr()) || !is_dtensor(made))
      throw py::type_error("parameter '" + param->forms().entries().name() + "' of a sharded module: what is applied to its "
                           "gradient, a DTensor, gave something else; expected a DTensor");
    auto local = local_tensor_of(made);
    if (!local.is_alias_of(local_tensor_of(shown))) applied.push_back({param.get(), std::move(local)});
  }
  return applied;
}

void copy_values(const std::vector<AppliedGradient>& applied) {
  at::NoGradGuard no_grad;
  for (const auto& [param, local] : applied) {
    const auto& gradient = param->sharded().local_tensor().grad();
    if (gradient.defined() && gradient.dtype() == local.dtype() && gradient.sizes() == local.sizes()) gradient.copy_(local);
  }
}

/// The parameter shows `local` again, in its dtype and on its device.
void put_back(ShownParam& param, const at::Tensor& local) {
  const auto parameter = param.sharded().object();
  const auto& now = param.sharded().tensor();
  const bool is_other = now.dtype() != local.dtype() || now.device() != local.device();
  if (is_other) {
    const auto made = param.maker().make_unsharded(local, parameter, now.requires_grad());
    py::module_::import("torch.utils").attr("swap_tensors")(parameter, made);
  } else {
    set_local_tensor(parameter, local);
  }
}

}  // namespace

void ApplyCall::begin(const ShownParams& params) {
  if (depth_++ > 0) return;
  prepare_apply(params);
  subclasses_.clear();
  for (const auto& param : params.all())
    subclasses_.push_back(param->sharded().holds_subclass() ? PyRef(param->sharded().object().attr("_local_tensor")) : PyRef());
}

void ApplyCall::end(const Groups& groups, const ShownParams& params, const py::object& function, const py::object& of) {
  if (depth_ > 1) {
    --depth_;
    return;
  }
  const auto gradients = apply_to_gradients(params, function, of);
  take_over_applied(groups, params, function.is_none() ? Changed::kTogether : Changed::kOneByOne);
  copy_values(gradients);
  for (const auto& param : params.all()) param->gradient().bring_back();  // of a group that has no memory yet, say
  depth_ = 0;
  subclasses_.clear();
}

void ApplyCall::give_up(const ShownParams& params) {
  if (depth_ == 0 || --depth_ > 0) return;
  for (size_t i = 0; i < params.all().size(); ++i) {
    auto& param = *params.all()[i];
    param.forms().entries().put(param.sharded().parameter());
    param.sharded().take_over_grad_dtype();
    put_back(param, i < subclasses_.size() && subclasses_[i] ? tensor_of(subclasses_[i].object())
                                                              : plain_view(param.sharded().local_tensor()));
    param.sharded().take_over_grad_dtype();
    param.point_home();
  }
  subclasses_.clear();
}

}  // namespace fsdp::python
