#include "collectives/view_pool.hpp"

#include <utility>

#include "base/raw_view.hpp"

namespace fsdp {

namespace {

void release_storage(void* storage) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(storage)); }

/// The storage's memory, which it keeps alive.
c10::DataPtr memory_of(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  return {impl->mutable_data(), impl, &release_storage, impl->device()};
}

}  // namespace

inline bool ViewPool::has_type_of(const at::Tensor& base) const {
  return shared_ && type_.keys == base.key_set() && type_.dtype == base.dtype() && shared_.device() == base.device();
}

void ViewPool::take_type(const at::Tensor& base) {
  // Those in the list are let go of and not used again; the others are made anew.
  for (size_t i = 0; i < used_; ++i) kinds_[i] = Kind::kOther;
  for (size_t i = used_; i < tensors_.size(); ++i) tensors_[i].reset();
  type_ = {base.key_set(), base.dtype()};
  shared_ = empty_storage(base.device());
  shown_base_ = nullptr;
}

/// The list's next place, for a tensor that takes the place of what is in it.
at::Tensor& ViewPool::add_place(Kind kind) {
  const size_t i = used_++;
  if (i == tensors_.size()) {
    tensors_.emplace_back();
    kinds_.emplace_back();
  }
  kinds_[i] = kind;
  return tensors_[i];
}

void ViewPool::begin() {
  if (used_ > 0 || shown_base_ != nullptr) let_go();
}

void ViewPool::begin(const at::Tensor& base) {
  begin();
  if (!has_type_of(base)) take_type(base);
  auto* shared = shared_.unsafeGetStorageImpl();
  shared->set_data_ptr_noswap(memory_of(base.storage()));
  shared->set_nbytes(base.storage().nbytes());
  shown_base_ = base.unsafeGetTensorImpl();
}

void ViewPool::add(const at::Tensor& base, int64_t numel, int64_t offset) {
  const auto kind = base.unsafeGetTensorImpl() == shown_base_ ? Kind::kShared : Kind::kAlone;
  if (kind == Kind::kAlone && !has_type_of(base)) take_type(base);
  const size_t i = used_;
  if (i >= tensors_.size() || kinds_[i] == Kind::kOther || tensors_[i].use_count() != 1) {
    auto& view = add_place(kind) = raw_view(base, numel, offset);
    if (kind == Kind::kShared) view.unsafeGetTensorImpl()->set_storage_keep_dtype(shared_);
    return;
  }
  ++used_;
  kinds_[i] = kind;
  auto* impl = tensors_[i].unsafeGetTensorImpl();
  if (kind == Kind::kAlone) impl->set_storage_keep_dtype(base.storage());
  if (impl->storage_offset() != offset) impl->set_storage_offset(offset);
  // A user's collective may have given it other sizes.
  if (impl->dim() != 1 || impl->numel() != numel) impl->set_sizes_contiguous({numel});
}

void ViewPool::add(at::Tensor tensor) { add_place(Kind::kOther) = std::move(tensor); }

/// Nobody holds one of the views or their storage.
bool ViewPool::is_shared_here_alone() const {
  size_t references = 1;
  bool are_ours = true;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (kinds_[i] != Kind::kShared || !tensors_[i].defined()) continue;
    ++references;
    are_ours &= i >= used_ || tensors_[i].use_count() == 1;
  }
  return are_ours && shared_.use_count() == references;
}

/// Who holds a view or the storage keeps the memory that it shows.
void ViewPool::empty_shared() {
  if (is_shared_here_alone()) {
    auto* shared = shared_.unsafeGetStorageImpl();
    shared->set_data_ptr_noswap(at::DataPtr(nullptr, shared->device()));
    shared->set_nbytes(0);
  } else {
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (kinds_[i] == Kind::kShared) tensors_[i].reset();
    shared_ = c10::Storage();
  }
  shown_base_ = nullptr;
}

void ViewPool::let_go() {
  if (shown_base_ != nullptr) empty_shared();
  for (size_t i = 0; i < used_; ++i) {
    auto& tensor = tensors_[i];
    if (kinds_[i] == Kind::kShared) continue;
    if (kinds_[i] == Kind::kAlone && tensor.use_count() == 1 && shared_) {
      tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(shared_);
      kinds_[i] = Kind::kShared;
    } else {
      tensor.reset();
    }
  }
  used_ = 0;
}

}  // namespace fsdp
