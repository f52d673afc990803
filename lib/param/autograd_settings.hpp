#pragma once

#include <ATen/core/Tensor.h>

#include "param/grad_dtype.hpp"

namespace fsdp {

/// What a user sets on either of a parameter's two tensors and has for both: `requires_grad` and `grad_dtype`. Where both
/// tensors were changed, the sharded one counts. Null is a tensor that is gone: then nothing is taken over.
class AutogradSettings {
 public:
  /// Takes the settings as they are on the parameter before it is sharded.
  explicit AutogradSettings(const at::Tensor& param)
      : requires_grad_(param.requires_grad()), grad_dtype_(grad_dtype_of(param)), unsharded_grad_dtype_(grad_dtype_) {}

  bool requires_grad() const { return requires_grad_; }
  /// Gives requires_grad up, for a place without a parameter.
  void freeze() { requires_grad_ = false; }
  bool has_new_requires_grad(c10::TensorImpl* unsharded, c10::TensorImpl* sharded) const;
  /// Takes what changed since the last call over to the other tensor. Returns whether anything did.
  bool sync_requires_grad(c10::TensorImpl* unsharded, c10::TensorImpl* sharded);

  const GradDtype& grad_dtype() const { return grad_dtype_; }
  /// Takes a changed grad_dtype over, as `sync_requires_grad` does, but the unsharded tensor follows with
  /// `set_unsharded_grad_dtype`.
  bool sync_grad_dtype(c10::TensorImpl* unsharded, c10::TensorImpl* sharded);
  /// Sets in which dtype autograd leaves gradients on the unsharded tensor. What a user has set there since is left for
  /// `sync_grad_dtype`.
  void set_unsharded_grad_dtype(const at::Tensor& unsharded, const GradDtype& value);
  const GradDtype& unsharded_grad_dtype() const { return unsharded_grad_dtype_; }

 private:
  bool requires_grad_;
  GradDtype grad_dtype_, unsharded_grad_dtype_;  // the user's; what the unsharded tensor has, by us or by the user
};

}  // namespace fsdp
