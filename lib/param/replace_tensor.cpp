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
/// Where LibTorch has these fields.
template <class Meta>
void move_grad_dtype(Meta& to, Meta& from) {
  if constexpr (requires { from.grad_dtype_; }) to.grad_dtype_ = from.grad_dtype_;
  if constexpr (requires { from.allow_grad_dtype_mismatch_; })
    to.allow_grad_dtype_mismatch_ = from.allow_grad_dtype_mismatch_;
}
}  // namespace

void forget_base(const at::Tensor& leaf) {
  auto* known = torch::autograd::impl::get_autograd_meta(leaf);
  if (known == nullptr || !known->is_view_) return;
  auto alone = std::make_unique<torch::autograd::AutogradMeta>();
  alone->name_ = std::move(known->name_);
  alone->grad_ = std::move(known->grad_);
  alone->grad_accumulator_ = std::move(known->grad_accumulator_);
  alone->fw_grad_ = std::move(known->fw_grad_);
  alone->hooks_ = std::move(known->hooks_);
  alone->cpp_hooks_list_ = std::move(known->cpp_hooks_list_);
  alone->post_acc_grad_hooks_ = std::move(known->post_acc_grad_hooks_);
  alone->requires_grad_ = known->requires_grad_;
  alone->retains_grad_ = known->retains_grad_;
  move_grad_dtype(*alone, *known);
  leaf.unsafeGetTensorImpl()->set_autograd_meta(std::move(alone));
}

}  // namespace fsdp
