#include <ATen/ATen.h>

#include "dispatch/residency.hpp"
#include "param/fsdp_param.hpp"
#include "param/replace_tensor.hpp"

namespace fsdp {

void ShardedParam::convert(at::ScalarType dtype, at::ScalarType param_dtype,
                           const at::Tensor& piece, const std::shared_ptr<ResidencyOwner>& owner,
                           c10::Device handle_device) {
  BelowResidency below;
  const auto registered = this->registered();
  sync_requires_grad();  // making the registered parameter again would undo what nobody has seen
                         // yet
  dtype_ = dtype;
  itemsize_ = static_cast<int64_t>(c10::elementSize(dtype));
  if (registered.defined()) {
    registered.mutable_grad().reset();
    make_registered(owner_, index_, piece);
    bump_version();
  }
  if (const auto handle = this->handle(); handle.defined()) handle.mutable_grad().reset();
  set_param_dtype(param_dtype, owner, handle_device);
}

void ShardedParam::set_param_dtype(at::ScalarType param_dtype,
                                   const std::shared_ptr<ResidencyOwner>& owner,
                                   c10::Device handle_device) {
  BelowResidency below;
  param_dtype_ = param_dtype;
  if (storage_ == nullptr) return;
  const auto handle = this->handle();
  storage_->retire(name_);
  if (!handle.defined()) {  // views of it are left, but nobody who could use it
    storage_ = nullptr;
    return;
  }
  const auto gradient = std::exchange(handle.mutable_grad(), {});
  replace_tensor(handle,
                 at::empty({0}, at::TensorOptions().dtype(param_dtype).device(handle_device)));
  take_over_handle(owner, index_, handle_device);
  // A graph that saved the handle itself is out of date, and is to say so.
  handle.unsafeGetTensorImpl()->bump_version();
  if (gradient.defined())
    handle.mutable_grad() = handle_grad_dtype_.takes_any() ? gradient : gradient.to(param_dtype);
}

}  // namespace fsdp
