#include "param/replace_tensor.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace fsdp {

void replace_tensor(const at::Tensor& tensor, const at::Tensor& other) {
  if (!tensor.is_meta() && !other.is_meta()) {
    tensor.set_data(other);
    return;
  }
  // The node that adds up gradients has recorded the old device.
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

namespace {
/// Moves these fields where LibTorch has them.
template <class Meta>
void move_grad_dtype(Meta& to, Meta& from) {
  if constexpr (requires { from.grad_dtype_; }) to.grad_dtype_ = from.grad_dtype_;
  if constexpr (requires { from.allow_grad_dtype_mismatch_; })
    to.allow_grad_dtype_mismatch_ = from.allow_grad_dtype_mismatch_;
}
}  // namespace

void move_autograd_fields(torch::autograd::AutogradMeta& from, torch::autograd::AutogradMeta& to) {
  to.name_ = std::move(from.name_);
  to.grad_ = std::move(from.grad_);
  to.grad_accumulator_ = std::move(from.grad_accumulator_);
  to.fw_grad_ = std::move(from.fw_grad_);
  to.hooks_ = std::move(from.hooks_);
  to.cpp_hooks_list_ = std::move(from.cpp_hooks_list_);
  to.post_acc_grad_hooks_ = std::move(from.post_acc_grad_hooks_);
  to.requires_grad_ = from.requires_grad_;
  to.retains_grad_ = from.retains_grad_;
  move_grad_dtype(to, from);
}

void forget_base(const at::Tensor& leaf) {
  auto* known = torch::autograd::impl::get_autograd_meta(leaf);
  if (known == nullptr || !known->is_view_) return;
  auto alone = std::make_unique<torch::autograd::AutogradMeta>();
  move_autograd_fields(*known, *alone);
  leaf.unsafeGetTensorImpl()->set_autograd_meta(std::move(alone));
}

}  // namespace fsdp
