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

}  // namespace fsdp
