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
/// Most often all are views of one tensor. They share a storage of the pool's, which takes that tensor's memory and lets go of
/// it once for all of them.
///
/// Not thread-safe; others may let go of the tensors on any thread.
class ViewPool {
 public:
  /// Begins an empty list, and lets go of what was in it.
  void begin();
  /// Begins so, for views of one memory. base: of which most views will be, and which stays while they are added. Holds its
  /// memory until the pool lets go.
  void begin(const at::Tensor& base);
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
  enum class Kind : char { kOther, kShared, kAlone };  // not a view; on `shared_`; on its base's storage
  struct ViewType {
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
  };

  bool has_type_of(const at::Tensor& base) const;
  void take_type(const at::Tensor& base);
  at::Tensor& add_place(Kind kind);
  bool is_shared_here_alone() const;
  void empty_shared();

  std::vector<at::Tensor> tensors_;
  std::vector<Kind> kinds_;  // by tensor
  size_t used_ = 0;          // of the tensors, the first ones
  ViewType type_;                // of all views
  c10::Storage shared_;      // of the views that are in no list, too: without memory then
  const c10::TensorImpl* shown_base_ = nullptr;  // whose memory `shared_` shows
};

}  // namespace fsdp
