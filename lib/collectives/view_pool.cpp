#include "collectives/view_pool.hpp"

#include <utility>

#include "base/raw_view.hpp"

namespace fsdp {

void ViewPool::take_form(const at::Tensor& base) {
  if (form_.nothing && form_.keys == base.key_set() && form_.dtype == base.dtype() && form_.nothing.device() == base.device())
    return;
  // Those in the list are let go of and not used again; the others are made anew.
  for (size_t i = 0; i < used_; ++i) is_view_[i] = false;
  for (size_t i = used_; i < tensors_.size(); ++i) tensors_[i].reset();
  form_ = {base.key_set(), base.dtype(),
           c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                              at::DataPtr(nullptr, base.device()), nullptr,
                                                              /*resizable=*/false))};
}

/// The list's next place, for a tensor that takes the place of what is in it.
at::Tensor& ViewPool::add_place(bool is_view) {
  const size_t i = used_++;
  if (i == tensors_.size()) {
    tensors_.emplace_back();
    is_view_.emplace_back();
  }
  is_view_[i] = is_view;
  return tensors_[i];
}

void ViewPool::add(const at::Tensor& base, int64_t numel, int64_t offset) {
  if (base.unsafeGetTensorImpl() != base_) {
    take_form(base);
    base_ = base.unsafeGetTensorImpl();
  }
  const size_t i = used_;
  if (i >= tensors_.size() || !is_view_[i] || !tensors_[i].defined() || tensors_[i].use_count() != 1) {
    add_place(/*is_view=*/true) = raw_view(base, numel, offset);
    return;
  }
  ++used_;
  auto* impl = tensors_[i].unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(base.storage());
  impl->set_storage_offset(offset);
  // A user's collective may have given it other sizes.
  if (impl->dim() != 1 || impl->numel() != numel) impl->set_sizes_contiguous({numel});
}

void ViewPool::add(at::Tensor tensor) { add_place(/*is_view=*/false) = std::move(tensor); }

void ViewPool::let_go() {
  for (size_t i = 0; i < used_; ++i) {
    auto& tensor = tensors_[i];
    if (is_view_[i] && tensor.use_count() == 1)
      tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(form_.nothing);
    else
      tensor.reset();
  }
  used_ = 0;
  base_ = nullptr;
}

}  // namespace fsdp
