#include "param/unsharded_tensor.hpp"

#include <ATen/ATen.h>

#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "param/replace_tensor.hpp"

namespace fsdp {

at::Tensor UnshardedTensor::tensor() const {
  auto impl = tensor_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

void UnshardedTensor::attach(const ParamSpec& spec, const std::shared_ptr<ParamOwner>& owner, const ParamRef& place,
                             c10::Device device) {
  BelowResidency below;
  const auto tensor = this->tensor();
  forget_base(tensor);
  auto storage =
      c10::make_intrusive<UnshardedStorage>(owner, place.link, place.index, spec.unsharded_bytes(), device, spec.name);
  storage_ = storage.get();
  point_at(spec, tensor, c10::Storage(std::move(storage)));
}

void UnshardedTensor::point_at(const ParamSpec& spec, const at::Tensor& tensor, c10::Storage storage) const {
  // Only for the device and the dtype: sizes and storage follow.
  const bool moves = tensor.is_meta() ? !storage.device().is_meta() : tensor.device() != storage.device();
  if (moves || tensor.scalar_type() != spec.param_dtype)
    replace_tensor(tensor, at::empty({0}, tensor.options()
                                              .device(moves ? storage.device() : tensor.device())
                                              .dtype(spec.param_dtype)
                                              .requires_grad(false)));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(spec.sizes(), spec.strides());
  add_residency_key(tensor);
}

bool UnshardedTensor::retire(const std::string& name) {
  if (storage_ == nullptr) return false;
  storage_->retire(name);
  if (tensor().defined()) return true;
  storage_ = nullptr;  // views of it are left, but nobody who could use it
  return false;
}

void UnshardedTensor::leave_to_aliases(const at::Tensor& values, const ParamSpec& spec,
                                       const std::shared_ptr<ParamOwner>& owner, const ParamRef& place) {
  const auto before = tensor().storage();
  auto* left = storage_;
  auto* shown = left->shown();
  attach(spec, owner, place, before.device());
  if (shown != nullptr) storage_->fill(shown);
  left->leave_to_aliases(values);
}

void UnshardedTensor::move_away(const std::string& name) {
  if (storage_ != nullptr) storage_->retire(name);
  storage_ = nullptr;
  tensor_ = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>();
}

c10::Storage UnshardedTensor::set_aside(const at::Tensor& whole) {
  BelowResidency below;
  const auto tensor = this->tensor();
  auto storage = tensor.storage();
  tensor.set_data(whole);
  storage_->set_aside(true);
  return storage;
}

void UnshardedTensor::restore(const ParamSpec& spec, c10::Storage storage) {
  BelowResidency below;
  static_cast<UnshardedStorage*>(storage.unsafeGetStorageImpl())->set_aside(false);
  if (const auto tensor = this->tensor(); tensor.defined()) point_at(spec, tensor, std::move(storage));
}

void UnshardedTensor::check(const std::string& name) const {
  const auto* tensor = peek();
  if (tensor == nullptr) return;  // the module is gone
  if (storage_ != nullptr && storage_->is_set_aside()) return;
  require_state(storage_ != nullptr && tensor->unsafe_storage().unsafeGetStorageImpl() == storage_ &&
                    has_residency_key(tensor),
                "{}: the tensor behind the module's member was replaced (set_data), so it is no "
                "longer the sharded parameter; write values with copy_ instead",
                name);
}

void UnshardedTensor::bump_version() const {
  if (auto* tensor = peek()) tensor->bump_version();
}

}  // namespace fsdp
