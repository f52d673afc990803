#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <optional>

#include "dispatch/param_storage.hpp"
#include "dtensor/dtensor_impl.hpp"

namespace fsdp {

/// One operator's operands: of one on lists, those of a position go together.
class PieceScan {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (!has_residency_key(impl)) {
      fits_ &= impl->dim() == 0;  // a scalar; what has elements is cut by the fallback
      ++scalars_;
    } else if (is_list_) {
      fits_ = false;  // one that stands beside lists
    } else if (const auto* dtensor = piece(impl)) {
      if (leaders_.empty())
        leaders_.push_back(dtensor);
      else
        fits_ &= dtensor->spec().is_placed_as(leaders_[0]->spec());
    }
  }
  void add(at::TensorList tensors) {
    is_list_ = true;
    const bool leads = leaders_.empty();
    if (leads) leaders_.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size() && fits_; ++i) {
      const auto* impl = tensors[i].unsafeGetTensorImpl();
      if (!has_residency_key(impl)) {
        fits_ &= !leads && tensors[i].defined() && impl->dim() == 0;
        ++scalars_;
      } else if (const auto* dtensor = piece(impl)) {
        if (leads)
          leaders_.push_back(dtensor);
        else
          fits_ = i < leaders_.size() && dtensor->spec().is_placed_as(leaders_[i]->spec());
      }
    }
  }
  void add(const std::optional<at::Tensor>& tensor) {
    if (tensor) add(*tensor);
  }
  template <class Other>
  void add(const Other&) {}

  bool fits() const { return fits_ && !leaders_.empty() && !(scalars_ > 0 && may_lack_element()); }
  const DTensorSpec::Ptr& spec(size_t position) const { return leaders_[position]->value().spec; }

  /// A parameter where operators see the unsharded one.
  static bool is_shown_whole(const DTensorImpl& dtensor) {
    const auto* local = dtensor.local().unsafeGetTensorImpl();
    if (!has_residency_key(local)) return false;
    const auto* storage = ParamStorage::of(local);
    return storage != nullptr && storage->owner() != nullptr && storage->owner()->is_in_scope();
  }

 private:
  /// A rank that has not got the element of a 0-dim DTensor has a piece of one dimension, which would decide the dtype of a
  /// result where a scalar stands beside it.
  bool may_lack_element() const {
    return std::ranges::any_of(leaders_,
                               [](const auto* leader) { return leader->dim() == 0 && !leader->spec().is_replicated(); });
  }
  const DTensorImpl* piece(const c10::TensorImpl* impl) {
    const auto* dtensor = typeid(*impl) == typeid(DTensorImpl) ? static_cast<const DTensorImpl*>(impl) : nullptr;
    const bool is_usable = dtensor != nullptr && dtensor->has_piece() &&
                           !(records_ && dtensor->requires_grad()) && !is_shown_whole(*dtensor);
    fits_ &= is_usable;
    return is_usable ? dtensor : nullptr;
  }

  c10::SmallVector<const DTensorImpl*, 1> leaders_;
  const bool records_ = at::GradMode::is_enabled();
  bool fits_ = true, is_list_ = false;
  int scalars_ = 0;  // beside them
};

}  // namespace fsdp
