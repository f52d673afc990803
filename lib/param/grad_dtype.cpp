#include "param/grad_dtype.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp {

namespace {

/// Where any gradient is taken LibTorch reads no dtype: this one says that it was the library that asked for it.
constexpr auto kByLibrary = at::ScalarType::Undefined;

torch::autograd::AutogradMeta* autograd_meta_of(const c10::TensorImpl& leaf) {
  return static_cast<torch::autograd::AutogradMeta*>(leaf.autograd_meta());
}

}  // namespace

GradDtype grad_dtype_of(const c10::TensorImpl& leaf) {
  const auto* meta = autograd_meta_of(leaf);
  if (meta == nullptr || (!meta->allow_grad_dtype_mismatch_ && !meta->grad_dtype_)) return {};
  if (!meta->allow_grad_dtype_mismatch_) return {.is_set = true, .dtype = meta->grad_dtype_};
  return {.is_set = true, .is_by_library = meta->grad_dtype_ == kByLibrary};
}

void set_grad_dtype(const at::Tensor& leaf, const GradDtype& value) {
  namespace autograd_impl = torch::autograd::impl;
  if (grad_dtype_of(leaf) == value) return;
  auto* meta = autograd_impl::materialize_autograd_meta(leaf);
  meta->grad_dtype_ = value.is_by_library ? std::optional(kByLibrary) : value.dtype;
  meta->allow_grad_dtype_mismatch_ = value.takes_any();
  // What casts gradients on their way to the leaf has its own copy.
  if (const auto accumulator = autograd_impl::try_get_grad_accumulator(leaf))
    accumulator->mutable_input_metadata(0).set_grad_dtype(value.is_set ? value.dtype
                                                                       : leaf.scalar_type());
}

void note_set_by_user(const c10::TensorImpl& leaf) {
  auto* meta = autograd_meta_of(leaf);
  if (meta != nullptr && meta->grad_dtype_ == kByLibrary) meta->grad_dtype_.reset();
}

}  // namespace fsdp
