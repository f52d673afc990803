#include "param/autograd_settings.hpp"

namespace fsdp {

bool AutogradSettings::has_new_requires_grad(const at::Tensor& unsharded, const at::Tensor& sharded) const {
  return unsharded.defined() && sharded.defined() &&
         (unsharded.requires_grad() != requires_grad_ || sharded.requires_grad() != requires_grad_);
}

bool AutogradSettings::sync_requires_grad(const at::Tensor& unsharded, const at::Tensor& sharded) {
  if (!has_new_requires_grad(unsharded, sharded)) return false;
  const bool sharded_changed = sharded.requires_grad() != requires_grad_;
  requires_grad_ = sharded_changed ? sharded.requires_grad() : unsharded.requires_grad();
  unsharded.set_requires_grad(requires_grad_);
  sharded.set_requires_grad(requires_grad_);
  return true;
}

bool AutogradSettings::sync_grad_dtype(const at::Tensor& unsharded, const at::Tensor& sharded) {
  if (!unsharded.defined() || !sharded.defined()) return false;
  const auto of_sharded = grad_dtype_of(sharded), of_unsharded = grad_dtype_of(unsharded);
  if (of_sharded == grad_dtype_ && of_unsharded == unsharded_grad_dtype_) return false;
  grad_dtype_ = of_sharded != grad_dtype_ ? of_sharded : of_unsharded;
  unsharded_grad_dtype_ = of_unsharded;
  set_grad_dtype(sharded, grad_dtype_);
  return true;
}

void AutogradSettings::set_unsharded_grad_dtype(const at::Tensor& unsharded, const GradDtype& value) {
  if (grad_dtype_of(unsharded) != unsharded_grad_dtype_) return;
  unsharded_grad_dtype_ = value;
  set_grad_dtype(unsharded, value);
}

}  // namespace fsdp
