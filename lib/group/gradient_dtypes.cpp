#include <ATen/ATen.h>

#include <algorithm>

#include "base/require.hpp"
#include "group/param_group.hpp"

// In which dtypes gradients arrive, are reduced and are kept: what the policy says, and what
// `grad_dtype` says of one parameter.
namespace fsdp {

namespace {

/// Gradients of a parameter that computes in `computed` come in this dtype, or in a smaller one
/// that it holds exactly.
bool is_wider(at::ScalarType wanted, at::ScalarType computed) {
  return at::isFloatingType(wanted) && at::isFloatingType(computed) &&
         c10::elementSize(wanted) > c10::elementSize(computed);
}

}  // namespace

at::ScalarType ParamGroup::reduce_dtype(size_t index,
                                        const std::optional<at::ScalarType>& gradient) const {
  return gradient && takes_any_gradient(index) ? *gradient : reduce_dtypes_[index];
}

bool ParamGroup::takes_any_gradient(size_t index) const {
  return params_[index].grad_dtype().takes_any() && !config_.mp_policy.reduce_dtype;
}

std::optional<at::ScalarType> ParamGroup::gradient_dtype(size_t index) const {
  const auto& param = params_[index];
  if (param.grad_dtype().is_set) return param.grad_dtype().dtype;
  if (config_.mp_policy.keep_low_precision_grads) return std::nullopt;
  return param.dtype();
}

bool ParamGroup::promotes_reductions() const {
  const auto& policy = config_.mp_policy;
  if (policy.reduce_dtype || !reduction_.in_own_dtype) return false;
  return policy.param_dtype ||
         std::any_of(params_.begin(), params_.end(),
                     [](const ShardedParam& param) { return param.grad_dtype().is_set; });
}

/// Before promotion: nullopt where any gradient is taken.
std::optional<at::ScalarType> ParamGroup::own_reduce_dtype(size_t index) const {
  const auto& param = params_[index];
  const auto& policy = config_.mp_policy;
  if (!at::isFloatingType(param.param_dtype())) return param.param_dtype();
  if (policy.reduce_dtype) return policy.reduce_dtype;
  if (param.grad_dtype().is_set) return param.grad_dtype().dtype;
  return reduction_.in_own_dtype ? param.dtype() : param.param_dtype();
}

void ParamGroup::plan_gradient_dtypes() {
  std::optional<at::ScalarType> joint;
  if (promotes_reductions())
    for (size_t i = 0; i < params_.size(); ++i) {
      const auto own = params_[i].requires_grad() ? own_reduce_dtype(i) : std::nullopt;
      if (own && at::isFloatingType(*own)) joint = joint ? at::promote_types(*joint, *own) : *own;
    }
  reduce_dtypes_.clear();
  takes_any_gradient_ = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    const auto own = own_reduce_dtype(i);
    takes_any_gradient_ |= takes_any_gradient(i);
    const bool joins = joint && at::isFloatingType(param.param_dtype());
    reduce_dtypes_.push_back(joins ? *joint : own.value_or(param.param_dtype()));
    // Autograd rounds each gradient to the leaf's own dtype. What is reduced in a wider one arrives
    // as it was made; the rest is cast when it is packed, unless a dtype was asked for.
    GradDtype of_handle = config_.mp_policy.reduce_dtype ? GradDtype() : param.grad_dtype();
    if (own && is_wider(*own, param.param_dtype()))
      of_handle = {.is_set = true, .is_by_library = true};
    param.set_handle_grad_dtype(of_handle);
  }
}

void ParamGroup::sync_grad_dtypes() {
  bool has_changed = false;
  for (auto& param : params_) has_changed |= param.sync_grad_dtype();
  if (classes_) classes_->check_grad_dtypes(*this);  // in every step, until it is set back
  if (!has_changed) return;
  plan_gradient_dtypes();
}

}  // namespace fsdp
