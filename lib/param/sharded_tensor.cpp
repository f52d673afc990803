#include "param/sharded_tensor.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "dispatch/residency.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "param/replace_tensor.hpp"
#include "param/unsharded_keeper.hpp"

namespace fsdp {

at::Tensor ShardedTensor::tensor() const {
  auto impl = tensor_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

at::Tensor ShardedTensor::registered() const {
  auto impl = registered_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

at::Tensor ShardedTensor::rows_on(const ParamSpec& spec, const at::Tensor& piece) const {
  auto storage = c10::make_intrusive<ShardStorage>(place_.link, place_.index, spec.local_bytes(),
                                                   piece.is_meta() ? nullptr : piece.mutable_data_ptr(), piece.storage(),
                                                   piece.device());
  auto tensor = at::empty({0}, at::TensorOptions().dtype(spec.dtype).device(piece.device()));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_sizes_and_strides(spec.local_sizes, spec.local_strides);
  return tensor;
}

bool ShardedTensor::has_aliases() const {
  const auto* impl = peek();
  if (impl == nullptr) return false;
  // The DTensor and its storage have the rows.
  return c10::raw::intrusive_ptr::use_count(const_cast<c10::TensorImpl*>(impl)) > 2 || impl->unsafe_storage().use_count() > 1;
}

void ShardedTensor::leave_to_aliases(const ParamSpec& spec, const at::Tensor& piece, const at::Tensor& unsharded) {
  if (!has_aliases()) return;
  const BelowResidency below;
  const auto registered = this->registered(), before = tensor();
  const c10::Storage storage_before = before.storage();
  auto* dtensor = DTensorImpl::of(registered);
  const auto fresh = rows_on(spec, piece);
  fresh.unsafeGetTensorImpl()->set_version_counter(before.unsafeGetTensorImpl()->version_counter());
  add_residency_key(fresh);
  torch::autograd::impl::add_hook(fresh, std::make_unique<UnshardedKeeper>(unsharded));
  shared_->join_piece(fresh);
  tensor_ = fresh.getIntrusivePtr();
  storage_ = fresh.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  dtensor->follow(fresh, spec.dtensor);
  ShardStorage::leave_to_aliases(storage_before);
}

void ShardedTensor::make(const ParamSpec& spec, ParamRef place, const at::Tensor& piece, const AutogradSettings& settings,
                         const at::Tensor& unsharded) {
  BelowResidency below;
  place_ = std::move(place);
  auto tensor = rows_on(spec, piece);
  if (auto known = this->tensor(); known.defined()) {
    replace_tensor(known, tensor);
    tensor = std::move(known);
  } else {
    begin(spec, tensor, settings, unsharded);
  }
  add_residency_key(tensor);
  storage_ = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto registered = this->registered();
  if (auto* dtensor = registered.defined() ? DTensorImpl::of(registered) : nullptr) {
    shared_->set_spec(spec.dtensor);
    dtensor->follow(tensor, spec.dtensor);
  }
  if (registered.defined() && registered.requires_grad() != settings.requires_grad())
    registered.set_requires_grad(settings.requires_grad());
}

/// Makes, the first time, the tensors that are there from now on.
void ShardedTensor::begin(const ParamSpec& spec, const at::Tensor& local, const AutogradSettings& settings,
                          const at::Tensor& unsharded) {
  initial_ = local;
  tensor_ = local.getIntrusivePtr();
  torch::autograd::impl::add_hook(local, std::make_unique<UnshardedKeeper>(unsharded));
  if (spec.dtensor) {
    initial_ = make_dtensor(local, spec.dtensor, WholeStorage::Message::kFull);
    shared_ = std::make_shared<SharedAutograd>(spec.dtensor, settings.requires_grad());
    shared_->join(initial_, SharedAutograd::Side::kDTensor);
    shared_->join_piece(local);
  }
  registered_ = initial_.getIntrusivePtr();
  identity_ = initial_.unsafeGetTensorImpl();
  set_grad_dtype(initial_, settings.grad_dtype());
}

void ShardedTensor::take(const ShardedTensor& other) {
  tensor_ = other.tensor_;
  registered_ = other.registered_;
  identity_ = other.identity_;
  shared_ = other.shared_;
}

void ShardedTensor::move_away() {
  tensor_ = registered_ = Strong();
  identity_ = nullptr;
  shared_ = nullptr;
}

void ShardedTensor::bump_version() const {
  if (auto* impl = peek()) impl->bump_version();
}

}  // namespace fsdp
