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

FSDPParam::FSDPParam(std::string name, const at::Tensor& unsharded_param, at::ScalarType param_dtype,
                           ShardLayout layout, int rank)
    : name_(std::move(name)),
      layout_(std::move(layout)),
      rank_(rank),
      dtype_(unsharded_param.scalar_type()),
      param_dtype_(param_dtype),
      itemsize_(static_cast<int64_t>(unsharded_param.element_size())),
      unsharded_param_(unsharded_param.getIntrusivePtr()),
      sharded_param_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()),
      requires_grad_(unsharded_param.requires_grad()),
      grad_dtype_(grad_dtype_of(unsharded_param)),
      unsharded_grad_dtype_(grad_dtype_) {}

std::vector<int64_t> FSDPParam::kept_strides(const at::Tensor& unsharded_param) {
  return is_dense(unsharded_param.sizes(), unsharded_param.strides()) ? unsharded_param.strides().vec()
                                                    : row_major_strides(unsharded_param.sizes());
}

at::Tensor FSDPParam::unsharded_param() const {
  auto impl = unsharded_param_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

at::Tensor FSDPParam::sharded_param() const {
  auto impl = sharded_param_.lock();
  return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
}

int64_t FSDPParam::current_version() const {
  const auto impl = sharded_param_.lock();
  return impl.defined() ? static_cast<int64_t>(impl->version_counter().current_version()) : seen_version_;
}

bool FSDPParam::was_changed() const {
  const auto impl = sharded_param_.lock();
  if (!impl.defined()) return false;
  return static_cast<int64_t>(impl->version_counter().current_version()) != seen_version_ ||
         impl->unsafe_storage().unsafeGetStorageImpl() != expected_storage_;
}

void FSDPParam::bump_version() {
  if (const auto impl = sharded_param_.lock(); impl.defined()) impl->bump_version();
}

void FSDPParam::keep_unsharded_alive(const at::Tensor& sharded_param) {
  torch::autograd::impl::add_hook(sharded_param, std::make_unique<UnshardedKeeper>(unsharded_param()));
}

/// This rank's part as a tensor on top of `piece`.
at::Tensor FSDPParam::view_of(const at::Tensor& piece) const {
  const auto values = piece.narrow(0, 0, local_bytes()).view(dtype_);
  return values.as_strided(layout_.local_sizes(rank_), layout_.local_strides(rank_), values.storage_offset());
}

void FSDPParam::take_identity(const FSDPParam& other) {
  dtype_ = other.dtype_;
  itemsize_ = other.itemsize_;
  sharded_param_ = other.sharded_param_;
  sharded_impl_ = other.sharded_impl_;
  requires_grad_ = other.requires_grad_;
  grad_dtype_ = other.grad_dtype_;
  unsharded_grad_dtype_ = other.unsharded_grad_dtype_;
}

void FSDPParam::move_away() {
  if (storage_ != nullptr) storage_->retire(name_);
  storage_ = nullptr;
  const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> nothing;
  unsharded_param_ = nothing;
  sharded_param_ = nothing;
  sharded_impl_ = nullptr;
  layout_ = ShardLayout(/*rows=*/int64_t{0}, layout_.world_size());
  requires_grad_ = false;
  has_moved_away_ = true;
}

void FSDPParam::copy_part_to(const at::Tensor& piece, const at::Tensor& whole) const {
  BelowResidency below;
  const int64_t bytes = local_bytes();
  if (bytes < piece.numel()) piece.narrow(0, bytes, piece.numel() - bytes).zero_();
  if (bytes > 0) view_of(piece).copy_(layout_.part_of(whole, rank_));
}

at::Tensor FSDPParam::own_memory(c10::Device device) const {
  const auto unsharded_param = this->unsharded_param();
  if (layout_.world_size() != 1 || is_cast() || unsharded_param.device() != device || unsharded_param.is_meta()) return {};
  if (!is_dense(unsharded_param.sizes(), unsharded_param.strides())) return {};
  BelowResidency below;
  auto bytes = at::empty({0}, unsharded_param.options().dtype(at::kByte).requires_grad(false));
  auto* impl = bytes.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(unsharded_param.storage());
  impl->set_storage_offset(unsharded_param.storage_offset() * itemsize_);
  impl->set_sizes_contiguous({local_bytes()});
  return bytes;
}

void FSDPParam::make_sharded_param(OwnerLink owner, size_t index, const at::Tensor& piece) {
  BelowResidency below;
  owner_ = std::move(owner);
  index_ = index;
  auto storage = c10::make_intrusive<ShardStorage>(
      owner_, index, local_bytes(), piece.is_meta() ? nullptr : piece.mutable_data_ptr(),
      piece.storage(), piece.device());
  auto sharded_param = at::empty({0}, at::TensorOptions().dtype(dtype_).device(piece.device()));
  auto* impl = sharded_param.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_sizes_and_strides(layout_.local_sizes(rank_), layout_.local_strides(rank_));
  if (auto known = this->sharded_param(); known.defined()) {
    replace_tensor(known, sharded_param);  // the tensor that optimizers know
    sharded_param = std::move(known);
  } else {
    initial_sharded_ = sharded_param;
    sharded_impl_ = sharded_param.unsafeGetTensorImpl();
    sharded_param_ = sharded_param.getIntrusivePtr();
    keep_unsharded_alive(sharded_param);
    fsdp::set_grad_dtype(sharded_param, grad_dtype_);
  }
  if (sharded_param.requires_grad() != requires_grad_) sharded_param.set_requires_grad(requires_grad_);
  add_residency_key(sharded_param);
  expected_storage_ = sharded_param.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void FSDPParam::check_unsharded() const {
  const auto unsharded_param = this->unsharded_param();
  if (!unsharded_param.defined()) return;  // the module is gone
  if (storage_ != nullptr && storage_->is_set_aside) return;
  require_state(storage_ != nullptr &&
                    unsharded_param.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_ &&
                    has_residency_key(unsharded_param.unsafeGetTensorImpl()),
                "{}: the tensor behind the module's member was replaced (set_data), so it is no "
                "longer the sharded parameter; write values with copy_ instead",
                name_);
}

void FSDPParam::reset_sharded_param(const at::Tensor& piece) {
  const auto sharded_param = this->sharded_param();
  if (!sharded_param.defined()) return;
  if (sharded_param.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == expected_storage_) return;
  BelowResidency below;
  auto values = sharded_param.detach();
  const bool is_whole = values.sizes() == c10::IntArrayRef(sizes());
  const auto local_sizes = layout_.local_sizes(rank_);
  const bool is_local = values.sizes() == c10::IntArrayRef(local_sizes);
  make_sharded_param(owner_, index_, piece);
  require_state(is_whole || is_local,
                "{}: its sharded parameter was replaced by a tensor of sizes {}; expected this "
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
  sharded_param.detach().copy_(values);
  bump_version();
}

void FSDPParam::attach(const std::shared_ptr<ParamOwner>& owner, size_t index,
                                    c10::Device device) {
  BelowResidency below;
  const auto unsharded_param = this->unsharded_param();
  forget_base(unsharded_param);
  seen_version_ = current_version();
  auto storage =
      c10::make_intrusive<UnshardedStorage>(owner, owner_, index, unsharded_bytes(), device, name_);
  storage_ = storage.get();
  point_unsharded_at(unsharded_param, c10::Storage(std::move(storage)));
}

void FSDPParam::point_unsharded_at(const at::Tensor& unsharded_param, c10::Storage storage) const {
  // Only for the device and the dtype: sizes and storage follow.
  const bool moves = unsharded_param.is_meta() ? !storage.device().is_meta() : unsharded_param.device() != storage.device();
  if (moves || unsharded_param.scalar_type() != param_dtype_)
    replace_tensor(unsharded_param, at::empty({0}, unsharded_param.options()
                                              .device(moves ? storage.device() : unsharded_param.device())
                                              .dtype(param_dtype_)
                                              .requires_grad(false)));
  auto* impl = unsharded_param.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(sizes(), strides());
  add_residency_key(unsharded_param);
}

c10::Storage FSDPParam::set_unsharded_aside(const at::Tensor& whole) {
  BelowResidency below;
  const auto unsharded_param = this->unsharded_param();
  auto storage = unsharded_param.storage();
  unsharded_param.set_data(whole);
  storage_->is_set_aside = true;
  return storage;
}

void FSDPParam::restore_unsharded(c10::Storage storage) {
  BelowResidency below;
  static_cast<UnshardedStorage*>(storage.unsafeGetStorageImpl())->is_set_aside = false;
  if (const auto unsharded_param = this->unsharded_param(); unsharded_param.defined())
    point_unsharded_at(unsharded_param, std::move(storage));
}

void FSDPParam::rename(std::string name) {
  name_ = std::move(name);
  if (storage_ != nullptr) storage_->set_name(name_);
}

void FSDPParam::cast_piece(const at::Tensor& piece, const at::Tensor& gathered) const {
  if (is_cast())
    gathered.view(param_dtype_).copy_(piece.view(dtype_));
  else
    gathered.copy_(piece);
}

void FSDPParam::write_back(const at::Tensor& unsharded, const at::Tensor& piece,
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

void FSDPParam::sync_version() {
  const int64_t now = current_version();
  if (now == seen_version_) return;
  seen_version_ = now;
  if (auto impl = unsharded_param_.lock(); impl.defined()) impl->bump_version();
}

void FSDPParam::mark_written() {
  bump_version();
  seen_version_ = current_version();
}

bool FSDPParam::has_new_requires_grad() const {
  const auto unsharded_param = unsharded_param_.lock(), sharded_param = sharded_param_.lock();
  return unsharded_param.defined() && sharded_param.defined() &&
         (unsharded_param->requires_grad() != requires_grad_ || sharded_param->requires_grad() != requires_grad_);
}

bool FSDPParam::sync_requires_grad() {
  const auto unsharded_param = unsharded_param_.lock(), sharded_param = sharded_param_.lock();
  if (!unsharded_param.defined() || !sharded_param.defined()) return false;
  const bool sharded_changed = sharded_param->requires_grad() != requires_grad_;
  const bool unsharded_changed = unsharded_param->requires_grad() != requires_grad_;
  if (!sharded_changed && !unsharded_changed) return false;
  requires_grad_ = sharded_changed ? sharded_param->requires_grad() : unsharded_param->requires_grad();
  unsharded_param->set_requires_grad(requires_grad_);
  sharded_param->set_requires_grad(requires_grad_);
  return true;
}

bool FSDPParam::sync_grad_dtype() {
  const auto unsharded_param = unsharded_param_.lock(), sharded_param = sharded_param_.lock();
  if (!unsharded_param.defined() || !sharded_param.defined()) return false;
  const auto of_sharded = grad_dtype_of(*sharded_param), of_unsharded = grad_dtype_of(*unsharded_param);
  if (of_sharded == grad_dtype_ && of_unsharded == unsharded_grad_dtype_) return false;
  grad_dtype_ = of_sharded != grad_dtype_ ? of_sharded : of_unsharded;
  unsharded_grad_dtype_ = of_unsharded;
  fsdp::set_grad_dtype(at::Tensor(sharded_param), grad_dtype_);
  return true;
}

void FSDPParam::set_unsharded_grad_dtype(const GradDtype& value) {
  const auto unsharded_param = this->unsharded_param();
  if (storage_ == nullptr || !unsharded_param.defined()) return;
  if (grad_dtype_of(unsharded_param) != unsharded_grad_dtype_) return;  // the user's, which the next step takes over
  unsharded_grad_dtype_ = value;
  fsdp::set_grad_dtype(unsharded_param, value);
}

}  // namespace fsdp
