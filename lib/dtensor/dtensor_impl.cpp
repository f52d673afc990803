#include "dtensor/dtensor_impl.hpp"

#include <ATen/ATen.h>

#include "base/require.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

namespace {

/// A piece has the keys of autograd and autocast.
c10::DispatchKeySet keys_of(const DTensorValue& value) {
  if (value.local.defined()) return value.local.key_set().add(kResidencyKey) - c10::python_ks;
  const c10::DispatchKeySet keys(c10::computeDispatchKey(value.partial->dtype(), c10::kStrided, value.partial->device()));
  const auto backend = keys.highestBackendKey();
  return keys.add(kResidencyKey) | c10::getAutogradRelatedKeySetFromBackend(backend) |
         c10::getAutocastRelatedKeySetFromBackend(backend);
}
caffe2::TypeMeta dtype_of(const DTensorValue& value) {
  return value.local.defined() ? value.local.dtype() : c10::scalarTypeToTypeMeta(value.partial->dtype());
}
c10::Device device_of(const DTensorValue& value) {
  return value.local.defined() ? value.local.device() : value.partial->device();
}

c10::Storage new_storage(const DTensorValue& value, WholeStorage::Message message) {
  return c10::Storage(c10::make_intrusive<WholeStorage>(value, message));
}
at::Tensor make_with_storage(DTensorValue value, WholeStorage::Message message) {
  auto storage = new_storage(value, message);
  return make_dtensor(std::move(value), std::move(storage));
}

}  // namespace

DTensorImpl::DTensorImpl(DTensorValue&& value, c10::Storage storage)
    // Without keys, as those of a tensor without a version counter of its own, which is the piece's.
    : TensorImpl(VIEW, c10::Storage(storage), c10::DispatchKeySet(), dtype_of(value)), value_(std::move(value)) {
  key_set_ = keys_of(value_);
  device_opt_ = device_of(value_);
  version_counter_ = value_.local.defined() ? value_.local.unsafeGetTensorImpl()->version_counter() : c10::VariableVersion(0);
  set_sizes_and_strides(value_.spec->sizes(), value_.spec->strides());
  // After the sizes, which may not be set with it.
  set_custom_sizes_strides(SizesStridesPolicy::CustomStrides);
  hold_.set(std::move(storage));
}

DTensorImpl::DTensorImpl(const DTensorImpl& viewed, at::Tensor base, DTensorValue value, const Geometry& geometry)
    : TensorImpl(VIEW, c10::Storage(viewed.storage_), c10::DispatchKeySet(), viewed.dtype()),
      value_(std::move(value)),
      base_(std::move(base)) {
  key_set_ = viewed.key_set_;
  device_opt_ = viewed.device_opt_;
  version_counter_ = viewed.version_counter();
  set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  set_custom_sizes_strides(SizesStridesPolicy::CustomStrides);
  hold_.set(viewed.storage_);
}

void DTensorImpl::hold(c10::Storage storage) {
  hold_.set(storage);
  storage_ = std::move(storage);
}

at::Tensor DTensorImpl::whole(std::string_view operation) const {
  if (value_.local.defined() || value_.partial) {
    const auto whole = value_.whole(operation);
    return whole.sizes() == sizes() ? whole : whole.view(sizes());
  }
  const auto elements = of(base_)->whole(operation);
  // Strides and offset of a window count elements in the memory of the base.
  const auto& spec = of(base_)->spec();
  const auto in_order = elements.strides() == c10::IntArrayRef(spec.strides())
                            ? elements
                            : at::empty_strided(spec.sizes(), spec.strides(), elements.options()).copy_(elements);
  return in_order.as_strided(sizes(), strides(), in_order.storage_offset() + storage_offset());
}

void DTensorImpl::release_resources() {
  value_ = {};
  base_.reset();
  hold_.set(c10::Storage());
  TensorImpl::release_resources();
}

void DTensorImpl::settle() {
  if (value_.partial) {
    count_here(value_.partial->read());
    value_.partial = nullptr;
  } else if (counts_apart_ && value_.local.defined()) {
    count_here(value_.local);
  }
  counts_apart_ = false;
}

void DTensorImpl::count_here(const at::Tensor& local) {
  value_.local = at::Tensor(local.unsafeGetTensorImpl()->shallow_copy_and_detach(version_counter(), true));
}

void DTensorImpl::follow(at::Tensor local, DTensorSpec::Ptr spec) {
  value_ = {.spec = std::move(spec), .local = std::move(local)};
  key_set_ = keys_of(value_);
  data_type_ = value_.local.dtype(), device_opt_ = value_.local.device();
  hold(new_storage(value_, WholeStorage::Message::kFull));
  keeps_memory_ = true;
}

/// from: of the whole's sizes.
void DTensorImpl::write(const at::Tensor& from) {
  const auto* other = of(from);
  require_state(from.scalar_type() == c10::typeMetaToScalarType(dtype()) && from.device() == device(),
                "{}: is {} on {} and cannot be replaced by a tensor that is {} on {}; use fsdp::to(module, ...), or write "
                "values with copy_. Nothing was changed",
                spec().name(), c10::toString(c10::typeMetaToScalarType(dtype())), device().str(),
                c10::toString(from.scalar_type()), from.device().str());
  const at::NoGradGuard no_grad;
  if (other != nullptr && other->has_piece() && other->spec().is_placed_as(spec()))
    value_.local.copy_(other->local());
  else
    value_.local.copy_(part_of(spec(), whole_of(from, "set_data").detach()));
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::copied(Version&& version, bool may_change) const {
  auto copy = c10::make_intrusive<DTensorImpl>(*this, base_, value_, Geometry{sizes(), strides(), storage_offset()});
  copy->set_version_counter(std::forward<Version>(version));
  copy->set_allow_tensor_metadata_change(may_change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                         bool may_change) const {
  auto copy = copied(version, may_change);
  static_cast<DTensorImpl&>(*copy).counts_apart_ = counts_apart_;
  return copy;
}
/// A counter of its own: `data()`.
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                         bool may_change) const {
  auto copy = copied(std::move(version), may_change);
  static_cast<DTensorImpl&>(*copy).counts_apart_ = true;
  return copy;
}

void DTensorImpl::take(const DTensorImpl& other) {
  value_ = other.value_, base_ = other.base_;
  hold(other.storage_);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& from) {
  const auto* other = of(from.get());
  const at::Tensor given(from);
  require(other != nullptr && !keeps_memory_ ? true : given.sizes() == sizes(),
          "{}: set_data expects a tensor of the whole's sizes {}, got {}; write this rank's part with "
          "fsdp::to_local(tensor).copy_(part)",
          spec().name().empty() ? "a sharded tensor" : spec().name(), sizes_text(sizes()), sizes_text(given.sizes()));
  if (keeps_memory_) return write(given);
  // A view that gets other data is one no longer.
  if (other == nullptr && base_.defined())
    value_ = {.spec = spec_like(spec(), sizes().vec(), std::vector<Placement>(spec().placements().size(), Replicate{}))};
  if (other != nullptr) {
    copy_tensor_metadata(other, this, version_counter(), allow_tensor_metadata_change());
    take(*other);
    if (value_.local.defined()) count_here(at::Tensor(value_.local));
  } else {
    base_ = at::Tensor();
    data_type_ = from->dtype(), device_opt_ = from->device();
    count_here(copy_part_of(spec(), given.detach()));
    hold(new_storage(value_, WholeStorage::Message::kFull));
  }
  bump_version();
}

at::Tensor make_dtensor(DTensorValue&& value, c10::Storage storage) {
  return at::Tensor(c10::make_intrusive<DTensorImpl>(std::move(value), std::move(storage)));
}

at::Tensor make_dtensor(at::Tensor local, DTensorSpec::Ptr spec, WholeStorage::Message message) {
  return make_with_storage({std::move(spec), std::move(local), nullptr}, message);
}

at::Tensor make_dtensor(PartialScalar::Ptr scalar, DTensorSpec::Ptr spec) {
  return make_with_storage({std::move(spec), {}, std::move(scalar)}, WholeStorage::Message::kNone);
}

at::Tensor make_copy(at::Tensor local, DTensorSpec::Ptr spec) {
  const auto made = make_dtensor(std::move(local), std::move(spec), WholeStorage::Message::kFull);
  WholeStorage::of(made.storage().unsafeGetStorageImpl())->list();
  return made;
}

at::Tensor whole_of(const at::Tensor& tensor, std::string_view operation) {
  const auto* dtensor = tensor.defined() ? DTensorImpl::of(tensor) : nullptr;
  return dtensor != nullptr ? dtensor->whole(operation) : tensor;
}

bool become_ordinary(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!has_residency_key(impl) || !impl->has_storage() || DTensorImpl::of(impl) != nullptr) return false;
  const auto* storage = WholeStorage::of(impl->unsafe_storage().unsafeGetStorageImpl());
  if (storage == nullptr) return false;
  impl->set_storage_keep_dtype(storage->value().own_whole("set_data").storage());
  remove_residency_key(tensor);
  return true;
}

}  // namespace fsdp
