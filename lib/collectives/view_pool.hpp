#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

/// What one collective is launched with, as a list of tensors that is made again for every launch. Views are made once and
/// pointed at other memory from then on: to make one costs a thousand instructions, and a group has several for each of its
/// parameters in each step. A view that somebody still holds, as a collective under way does, is left to him.
///
/// Not thread-safe; others may let go of the tensors on any thread.
class ViewPool {
 public:
  /// An empty list, and what was in it is let go.
  void begin() {
    if (used_ > 0) let_go();
    base_ = nullptr;
  }
  /// 1-D: `numel` elements of base's storage from element `offset` on, as raw_view.
  void add(const at::Tensor& base, int64_t numel, int64_t offset);
  /// A tensor as it is.
  void add(at::Tensor tensor);
  std::span<const at::Tensor> tensors() const { return {tensors_.data(), used_}; }

  /// The list is empty, and no memory is held.
  void let_go();
  /// So are the views: for a collective that is under way, whose thread may be about to let go of them.
  void drop() { *this = ViewPool(); }

 private:
  struct Form {
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    c10::Storage nothing;  // without memory, where the views are
  };

  void take_form(const at::Tensor& base);
  at::Tensor& add_place(bool is_view);

  std::vector<at::Tensor> tensors_;
  std::vector<char> is_view_;  // by tensor
  size_t used_ = 0;            // of the tensors, the first ones
  Form form_;                  // of all views
  const c10::TensorImpl* base_ = nullptr;  // of the last view in the list, whose form has been taken
};

}  // namespace fsdp
