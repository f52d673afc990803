#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp {

/// Which dtype the gradient of a leaf is to have: LibTorch's `grad_dtype`, with the difference
/// between one that was never set, which follows the tensor's dtype, and one that was set to it.
struct GradDtype {
  bool is_set = false;
  std::optional<at::ScalarType> dtype = {};  ///< where it is set: none: whatever autograd makes
  /// Whatever autograd makes, and it was the library that asked for it: a user who sets that later says something new.
  bool is_by_library = false;
  bool takes_any() const { return is_set && !dtype; }
  bool operator==(const GradDtype&) const = default;
};

GradDtype grad_dtype_of(const c10::TensorImpl& leaf);
inline GradDtype grad_dtype_of(const at::Tensor& leaf) {
  return grad_dtype_of(*leaf.unsafeGetTensorImpl());
}

/// Sets the leaf's grad_dtype, also back to unset, for which LibTorch has no function, and also while there is a gradient of
/// another dtype, which stays.
void set_grad_dtype(const at::Tensor& leaf, const GradDtype& value);

/// Notes that LibTorch's own setter has been called, which leaves as it was what it does not read: a mark that the library had
/// asked for any gradient goes.
void note_set_by_user(const c10::TensorImpl& leaf);

}  // namespace fsdp
