#include <ATen/ATen.h>

#include "dispatch/residency.hpp"
#include "param/fsdp_param.hpp"
#include "param/replace_tensor.hpp"

namespace fsdp {

void FSDPParam::convert(at::ScalarType dtype, at::ScalarType param_dtype,
                           const at::Tensor& piece, const std::shared_ptr<ParamOwner>& owner,
                           c10::Device unsharded_device) {
  BelowResidency below;
  const auto sharded_param = this->sharded_param();
  sync_requires_grad();  // making the sharded parameter again would undo what nobody has seen
                         // yet
  dtype_ = dtype;
  itemsize_ = static_cast<int64_t>(c10::elementSize(dtype));
  if (sharded_param.defined()) {
    sharded_param.mutable_grad().reset();
    make_sharded_param(owner_, index_, piece);
    bump_version();
  }
  if (const auto unsharded_param = this->unsharded_param(); unsharded_param.defined()) unsharded_param.mutable_grad().reset();
  set_param_dtype(param_dtype, owner, unsharded_device);
}

void FSDPParam::set_param_dtype(at::ScalarType param_dtype,
                                   const std::shared_ptr<ParamOwner>& owner,
                                   c10::Device unsharded_device) {
  BelowResidency below;
  param_dtype_ = param_dtype;
  if (storage_ == nullptr) return;
  const auto unsharded_param = this->unsharded_param();
  storage_->retire(name_);
  if (!unsharded_param.defined()) {  // views of it are left, but nobody who could use it
    storage_ = nullptr;
    return;
  }
  const auto gradient = std::exchange(unsharded_param.mutable_grad(), {});
  replace_tensor(unsharded_param,
                 at::empty({0}, at::TensorOptions().dtype(param_dtype).device(unsharded_device)));
  attach(owner, index_, unsharded_device);
  // A graph that saved the unsharded parameter itself is out of date, and is to say so.
  unsharded_param.unsafeGetTensorImpl()->bump_version();
  if (gradient.defined())
    unsharded_param.mutable_grad() = unsharded_grad_dtype_.takes_any() ? gradient : gradient.to(param_dtype);
}

}  // namespace fsdp
