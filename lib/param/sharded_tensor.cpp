#include "param/sharded_tensor.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "dispatch/residency.hpp"
#include "param/replace_tensor.hpp"
#include "param/unsharded_keeper.hpp"

namespace fsdp {

at::Tensor ShardedTensor::tensor() const {
  auto impl = tensor_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

void ShardedTensor::make(const ParamSpec& spec, ParamRef place, const at::Tensor& piece, const AutogradSettings& settings,
                         const at::Tensor& unsharded) {
  BelowResidency below;
  place_ = std::move(place);
  auto storage = c10::make_intrusive<ShardStorage>(place_.link, place_.index, spec.local_bytes(),
                                                   piece.is_meta() ? nullptr : piece.mutable_data_ptr(), piece.storage(),
                                                   piece.device());
  auto tensor = at::empty({0}, at::TensorOptions().dtype(spec.dtype).device(piece.device()));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_sizes_and_strides(spec.local_sizes, spec.local_strides);
  if (auto known = this->tensor(); known.defined()) {
    replace_tensor(known, tensor);
    tensor = std::move(known);
  } else {
    initial_ = tensor;
    identity_ = tensor.unsafeGetTensorImpl();
    tensor_ = tensor.getIntrusivePtr();
    torch::autograd::impl::add_hook(tensor, std::make_unique<UnshardedKeeper>(unsharded));
    set_grad_dtype(tensor, settings.grad_dtype());
  }
  if (tensor.requires_grad() != settings.requires_grad()) tensor.set_requires_grad(settings.requires_grad());
  add_residency_key(tensor);
  storage_ = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void ShardedTensor::take(const ShardedTensor& other) {
  tensor_ = other.tensor_;
  identity_ = other.identity_;
}

void ShardedTensor::move_away() {
  tensor_ = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>();
  identity_ = nullptr;
}

bool ShardedTensor::was_changed() const {
  const auto impl = tensor_.lock();
  if (!impl.defined()) return false;
  return static_cast<int64_t>(impl->version_counter().current_version()) != seen_version_ ||
         impl->unsafe_storage().unsafeGetStorageImpl() != storage_;
}

bool ShardedTensor::was_replaced() const {
  const auto impl = tensor_.lock();
  return impl.defined() && impl->unsafe_storage().unsafeGetStorageImpl() != storage_;
}

int64_t ShardedTensor::version() const {
  const auto impl = tensor_.lock();
  return impl.defined() ? static_cast<int64_t>(impl->version_counter().current_version()) : seen_version_;
}

void ShardedTensor::bump_version() const {
  if (const auto impl = tensor_.lock(); impl.defined()) impl->bump_version();
}

}  // namespace fsdp
