#include "param/fsdp_param.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <numeric>

#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "param/replace_tensor.hpp"
#include "param/unsharded_keeper.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

ShardedParam::ShardedParam(std::string name, const at::Tensor& handle, at::ScalarType param_dtype,
                           ShardLayout layout, int rank)
    : name_(std::move(name)),
      layout_(std::move(layout)),
      rank_(rank),
      dtype_(handle.scalar_type()),
      param_dtype_(param_dtype),
      itemsize_(static_cast<int64_t>(handle.element_size())),
      handle_(handle.getIntrusivePtr()),
      registered_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()),
      requires_grad_(handle.requires_grad()),
      grad_dtype_(grad_dtype_of(handle)),
      handle_grad_dtype_(grad_dtype_) {}

std::vector<int64_t> ShardedParam::kept_strides(const at::Tensor& handle) {
  return is_dense(handle.sizes(), handle.strides()) ? handle.strides().vec()
                                                    : row_major_strides(handle.sizes());
}

at::Tensor ShardedParam::handle() const {
  auto impl = handle_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

at::Tensor ShardedParam::registered() const {
  auto impl = registered_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

int64_t ShardedParam::current_version() const {
  const auto impl = registered_.lock();
  return impl.defined() ? static_cast<int64_t>(impl->version_counter().current_version()) : seen_version_;
}

bool ShardedParam::was_changed() const {
  const auto impl = registered_.lock();
  if (!impl.defined()) return false;
  return static_cast<int64_t>(impl->version_counter().current_version()) != seen_version_ ||
         impl->unsafe_storage().unsafeGetStorageImpl() != expected_storage_;
}

void ShardedParam::bump_version() {
  if (const auto impl = registered_.lock(); impl.defined()) impl->bump_version();
}

void ShardedParam::keep_handle_alive(const at::Tensor& registered) {
  torch::autograd::impl::add_hook(registered, std::make_unique<HandleKeeper>(handle()));
}

/// This rank's part as a tensor on top of `piece`.
at::Tensor ShardedParam::view_of(const at::Tensor& piece) const {
  const auto values = piece.narrow(0, 0, local_bytes()).view(dtype_);
  return values.as_strided(layout_.local_sizes(rank_), layout_.local_strides(rank_), values.storage_offset());
}

void ShardedParam::take_identity(const ShardedParam& other) {
  dtype_ = other.dtype_;
  itemsize_ = other.itemsize_;
  registered_ = other.registered_;
  registered_impl_ = other.registered_impl_;
  requires_grad_ = other.requires_grad_;
  grad_dtype_ = other.grad_dtype_;
  handle_grad_dtype_ = other.handle_grad_dtype_;
}

void ShardedParam::vacate() {
  if (storage_ != nullptr) storage_->retire(name_);
  storage_ = nullptr;
  const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> nothing;
  handle_ = nothing;
  registered_ = nothing;
  registered_impl_ = nullptr;
  layout_ = ShardLayout(/*rows=*/int64_t{0}, layout_.world_size());
  requires_grad_ = false;
  is_vacant_ = true;
}

void ShardedParam::copy_part_to(const at::Tensor& piece, const at::Tensor& whole) const {
  BelowResidency below;
  const int64_t bytes = local_bytes();
  if (bytes < piece.numel()) piece.narrow(0, bytes, piece.numel() - bytes).zero_();
  if (bytes > 0) view_of(piece).copy_(layout_.part_of(whole, rank_));
}

at::Tensor ShardedParam::own_memory(c10::Device device) const {
  const auto handle = this->handle();
  if (layout_.world_size() != 1 || is_cast() || handle.device() != device || handle.is_meta()) return {};
  if (!is_dense(handle.sizes(), handle.strides())) return {};
  BelowResidency below;
  auto bytes = at::empty({0}, handle.options().dtype(at::kByte).requires_grad(false));
  auto* impl = bytes.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(handle.storage());
  impl->set_storage_offset(handle.storage_offset() * itemsize_);
  impl->set_sizes_contiguous({local_bytes()});
  return bytes;
}

void ShardedParam::make_registered(OwnerLink owner, size_t index, const at::Tensor& piece) {
  BelowResidency below;
  owner_ = std::move(owner);
  index_ = index;
  auto storage = c10::make_intrusive<RegisteredStorage>(
      owner_, index, local_bytes(), piece.is_meta() ? nullptr : piece.mutable_data_ptr(),
      piece.storage(), piece.device());
  auto registered = at::empty({0}, at::TensorOptions().dtype(dtype_).device(piece.device()));
  auto* impl = registered.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_sizes_and_strides(layout_.local_sizes(rank_), layout_.local_strides(rank_));
  if (auto known = this->registered(); known.defined()) {
    replace_tensor(known, registered);  // the tensor that optimizers know
    registered = std::move(known);
  } else {
    initial_registered_ = registered;
    registered_impl_ = registered.unsafeGetTensorImpl();
    registered_ = registered.getIntrusivePtr();
    keep_handle_alive(registered);
    fsdp::set_grad_dtype(registered, grad_dtype_);
  }
  if (registered.requires_grad() != requires_grad_) registered.set_requires_grad(requires_grad_);
  add_residency_key(registered);
  expected_storage_ = registered.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void ShardedParam::check_handle() const {
  const auto handle = this->handle();
  if (!handle.defined()) return;  // the module is gone
  if (storage_ != nullptr && storage_->is_set_aside) return;
  require_state(storage_ != nullptr &&
                    handle.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_ &&
                    has_residency_key(handle.unsafeGetTensorImpl()),
                "{}: the tensor behind the module's member was replaced (set_data), so it is no "
                "longer the sharded parameter; write values with copy_ instead",
                name_);
}

void ShardedParam::reset_sharded_param(const at::Tensor& piece) {
  const auto registered = this->registered();
  if (!registered.defined()) return;
  if (registered.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == expected_storage_) return;
  BelowResidency below;
  auto values = registered.detach();
  const bool is_whole = values.sizes() == c10::IntArrayRef(sizes());
  const auto local_sizes = layout_.local_sizes(rank_);
  const bool is_local = values.sizes() == c10::IntArrayRef(local_sizes);
  make_registered(owner_, index_, piece);
  require_state(is_whole || is_local,
                "{}: its registered parameter was replaced by a tensor of sizes {}; expected this "
                "rank's part ({}) or the whole parameter ({}). The old values are back in place",
                name_, fmt::join(values.sizes(), "x"), fmt::join(local_sizes, "x"),
                fmt::join(sizes(), "x"));
  require_state(values.scalar_type() == dtype_,
                "{}: its dtype was changed from {} to {} after fully_shard; use fsdp::to(module, "
                "dtype), or write values with copy_. The old values are back in place",
                name_, c10::toString(dtype_), c10::toString(values.scalar_type()));
  require_state(values.device() == piece.device(),
                "{}: it was moved from {} to {} after fully_shard; use fsdp::to(module, device). The "
                "old values are back in place",
                name_, piece.device().str(), values.device().str());
  if (is_whole && !is_local) values = layout_.part_of(values, rank_);
  registered.detach().copy_(values);
  bump_version();
}

void ShardedParam::take_over_handle(const std::shared_ptr<ResidencyOwner>& owner, size_t index,
                                    c10::Device device) {
  BelowResidency below;
  const auto handle = this->handle();
  forget_base(handle);
  seen_version_ = current_version();
  auto storage =
      c10::make_intrusive<HandleStorage>(owner, owner_, index, unsharded_bytes(), device, name_);
  storage_ = storage.get();
  point_handle_at(handle, c10::Storage(std::move(storage)));
}

void ShardedParam::point_handle_at(const at::Tensor& handle, c10::Storage storage) const {
  // Only for the device and the dtype: sizes and storage follow.
  const bool moves = handle.is_meta() ? !storage.device().is_meta() : handle.device() != storage.device();
  if (moves || handle.scalar_type() != param_dtype_)
    replace_tensor(handle, at::empty({0}, handle.options()
                                              .device(moves ? storage.device() : handle.device())
                                              .dtype(param_dtype_)
                                              .requires_grad(false)));
  auto* impl = handle.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(sizes(), strides());
  add_residency_key(handle);
}

c10::Storage ShardedParam::set_handle_aside(const at::Tensor& whole) {
  BelowResidency below;
  const auto handle = this->handle();
  auto storage = handle.storage();
  handle.set_data(whole);
  storage_->is_set_aside = true;
  return storage;
}

void ShardedParam::restore_handle(c10::Storage storage) {
  BelowResidency below;
  static_cast<HandleStorage*>(storage.unsafeGetStorageImpl())->is_set_aside = false;
  if (const auto handle = this->handle(); handle.defined())
    point_handle_at(handle, std::move(storage));
}

void ShardedParam::rename(std::string name) {
  name_ = std::move(name);
  if (storage_ != nullptr) storage_->set_name(name_);
}

void ShardedParam::cast_piece(const at::Tensor& piece, const at::Tensor& gathered) const {
  if (is_cast())
    gathered.view(param_dtype_).copy_(piece.view(dtype_));
  else
    gathered.copy_(piece);
}

void ShardedParam::write_back(const at::Tensor& unsharded, const at::Tensor& piece,
                              const at::Tensor& shown) const {
  if (local_bytes() == 0) return;
  const auto elements = unsharded.view(param_dtype_);
  const auto whole = elements.as_strided(sizes(), strides(), elements.storage_offset());
  const auto kept = view_of(piece);
  const auto written = layout_.part_of(whole, rank_).to(kept.device());
  if (!is_cast() && !shown.defined()) {
    kept.copy_(written);
    return;
  }
  // An operator may have written a few elements: the others keep the bits that the cast dropped.
  const auto before =
      shown.defined() ? shown.as_strided(layout_.local_sizes(rank_), layout_.local_strides(rank_)) : kept.to(param_dtype_);
  const auto is_same = before.eq(written).logical_or_(before.isnan().logical_and_(written.isnan()));
  kept.copy_(at::where(is_same, kept, written.to(dtype_)));
}

void ShardedParam::follow_version() {
  const int64_t now = current_version();
  if (now == seen_version_) return;
  seen_version_ = now;
  if (auto impl = handle_.lock(); impl.defined()) impl->bump_version();
}

void ShardedParam::note_own_write() {
  bump_version();
  seen_version_ = current_version();
}

bool ShardedParam::has_new_requires_grad() const {
  const auto handle = handle_.lock(), registered = registered_.lock();
  return handle.defined() && registered.defined() &&
         (handle->requires_grad() != requires_grad_ || registered->requires_grad() != requires_grad_);
}

bool ShardedParam::sync_requires_grad() {
  const auto handle = handle_.lock(), registered = registered_.lock();
  if (!handle.defined() || !registered.defined()) return false;
  const bool registered_changed = registered->requires_grad() != requires_grad_;
  const bool handle_changed = handle->requires_grad() != requires_grad_;
  if (!registered_changed && !handle_changed) return false;
  requires_grad_ = registered_changed ? registered->requires_grad() : handle->requires_grad();
  handle->set_requires_grad(requires_grad_);
  registered->set_requires_grad(requires_grad_);
  return true;
}

bool ShardedParam::sync_grad_dtype() {
  const auto handle = handle_.lock(), registered = registered_.lock();
  if (!handle.defined() || !registered.defined()) return false;
  const auto of_registered = grad_dtype_of(*registered), of_handle = grad_dtype_of(*handle);
  if (of_registered == grad_dtype_ && of_handle == handle_grad_dtype_) return false;
  grad_dtype_ = of_registered != grad_dtype_ ? of_registered : of_handle;
  handle_grad_dtype_ = of_handle;
  fsdp::set_grad_dtype(at::Tensor(registered), grad_dtype_);
  return true;
}

void ShardedParam::set_handle_grad_dtype(const GradDtype& value) {
  const auto handle = this->handle();
  if (storage_ == nullptr || !handle.defined()) return;
  if (grad_dtype_of(handle) != handle_grad_dtype_) return;  // the user's, which the next step takes over
  handle_grad_dtype_ = value;
  fsdp::set_grad_dtype(handle, value);
}

}  // namespace fsdp
