#include <ATen/ATen.h>

#include "param/replace_tensor.hpp"
#include "param/residency.hpp"
#include "param/sharded_param.hpp"

namespace fsdp {

void ShardedParam::convert(at::ScalarType dtype, at::ScalarType param_dtype,
                           const at::Tensor& piece, const std::shared_ptr<ResidencyOwner>& owner) {
  BelowResidency below;
  const auto registered = this->registered(), handle = this->handle();
  sync_requires_grad();  // making the registered parameter again would undo what nobody has seen
                         // yet
  dtype_ = dtype;
  param_dtype_ = param_dtype;
  itemsize_ = static_cast<int64_t>(c10::elementSize(dtype));
  if (registered.defined()) {
    registered.mutable_grad().reset();
    make_registered(owner_, index_, piece);
    bump_version();
  }
  if (storage_ == nullptr) return;
  storage_->retire(name_);
  if (!handle.defined()) {  // views of it are left, but nobody who could use it
    storage_ = nullptr;
    return;
  }
  handle.mutable_grad().reset();
  replace_tensor(handle,
                 at::empty({0}, at::TensorOptions().dtype(param_dtype).device(piece.device())));
  take_over_handle(owner, index_, piece.device());
  // A graph that saved the handle itself is out of date, and is to say so.
  handle.unsafeGetTensorImpl()->bump_version();
}

}  // namespace fsdp
