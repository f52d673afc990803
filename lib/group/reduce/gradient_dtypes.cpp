#include "group/reduce/gradient_dtypes.hpp"

#include <ATen/ATen.h>

#include <algorithm>

namespace fsdp {

namespace {

/// Gradients of a parameter that computes in `computed` come in this dtype, or in a smaller one
/// that it holds exactly.
bool is_wider(at::ScalarType wanted, at::ScalarType computed) {
  return at::isFloatingType(wanted) && at::isFloatingType(computed) &&
         c10::elementSize(wanted) > c10::elementSize(computed);
}

}  // namespace

at::ScalarType GradientDtypes::reduce_dtype(size_t index,
                                        const std::optional<at::ScalarType>& gradient) const {
  return gradient && takes_any(index) ? *gradient : reduce_dtypes_[index];
}

bool GradientDtypes::takes_any(size_t index) const {
  return parts_.params[index].grad_dtype().takes_any() && !parts_.config.mp_policy.reduce_dtype;
}

bool GradientDtypes::promotes() const {
  const auto& policy = parts_.config.mp_policy;
  if (policy.reduce_dtype || !reduction_.in_own_dtype) return false;
  return policy.param_dtype ||
         std::any_of(parts_.params.begin(), parts_.params.end(),
                     [](const FSDPParam& param) { return param.grad_dtype().is_set; });
}

/// Before promotion: nullopt where any gradient is taken.
std::optional<at::ScalarType> GradientDtypes::own_reduce_dtype(size_t index, const ParamDtypes& dtypes) const {
  const auto& param = parts_.params[index];
  const auto& policy = parts_.config.mp_policy;
  if (!at::isFloatingType(dtypes.gathered[index])) return dtypes.gathered[index];
  if (policy.reduce_dtype) return policy.reduce_dtype;
  if (param.grad_dtype().is_set) return param.grad_dtype().dtype;
  return reduction_.in_own_dtype ? dtypes.stored[index] : dtypes.gathered[index];
}

GradientDtypes::Plan GradientDtypes::decide(const ParamDtypes& dtypes, std::span<const size_t> leaving) const {
  std::optional<at::ScalarType> joint;
  if (promotes())
    for (size_t i = 0; i < parts_.params.size(); ++i) {
      const bool counts = parts_.params[i].requires_grad() && std::ranges::find(leaving, i) == leaving.end();
      const auto own = counts ? own_reduce_dtype(i, dtypes) : std::nullopt;
      if (own && at::isFloatingType(*own)) joint = joint ? at::promote_types(*joint, *own) : *own;
    }
  Plan plan;
  for (size_t i = 0; i < parts_.params.size(); ++i) {
    const auto gathered = dtypes.gathered[i];
    const auto own = own_reduce_dtype(i, dtypes);
    plan.reduced.push_back(joint && at::isFloatingType(gathered) ? *joint : own.value_or(gathered));
    // Autograd rounds each gradient to the leaf's own dtype. What is reduced in a wider one arrives
    // as it was made; the rest is cast when it is packed, unless a dtype was asked for.
    auto& of_unsharded = plan.of_unsharded.emplace_back();
    if (!parts_.config.mp_policy.reduce_dtype) of_unsharded = parts_.params[i].grad_dtype();
    if (own && is_wider(*own, gathered)) of_unsharded = {.is_set = true, .is_by_library = true};
  }
  return plan;
}

void GradientDtypes::set(Plan plan) {
  reduce_dtypes_ = std::move(plan.reduced);
  takes_any_ = false;
  for (size_t i = 0; i < parts_.params.size(); ++i) {
    takes_any_ |= takes_any(i);
    parts_.params[i].set_unsharded_grad_dtype(plan.of_unsharded[i]);
  }
}

}  // namespace fsdp
