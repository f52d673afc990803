#pragma once

#include <memory>

#include "param/fsdp_param.hpp"
#include "shown/compute_handle.hpp"
#include "shown/param_entries.hpp"
#include "shown/sharded_dtensor.hpp"

namespace fsdp::python {

/// Between forward and backward parameters may be kept as shards of a part of the ranks.
struct PostForwardMesh {
  PyRef mesh;  ///< torch's, of two dimensions: replicate, shard; None: parameters are not kept so
  int rank = 0, ranks = 0;  ///< of the shard dimension
};

/// What modules' tables hold of one parameter: its DTensor; inside forward the parameter that was there before, which is the
/// core's unsharded parameter or stands for it; behind a forward that keeps a larger shard, a DTensor over that.
///
/// Every function needs the interpreter's lock.
class ParamForms {
 public:
  /// sharded: outlives it. unsharded: the unsharded parameter, which modules compute with, or, unless it is null, with the
  /// `handle` that stands for it.
  ParamForms(const ShardedDTensor& sharded, py::object unsharded, std::unique_ptr<ComputeHandle> handle)
      : sharded_(sharded), unsharded_(std::move(unsharded)), handle_(std::move(handle)) {}

  const PyRef& unsharded() const { return unsharded_; }
  bool computes_with_handle() const { return handle_ != nullptr; }
  /// Makes `handle` what modules compute with from now on. The sharded parameter has to be shown at the call.
  void compute_with(std::unique_ptr<ComputeHandle> handle) { handle_ = std::move(handle); }
  /// For a copy of the parameter with this unsharded parameter; null where modules compute with the unsharded parameter itself.
  std::unique_ptr<ComputeHandle> handle_over(at::Tensor unsharded) const {
    return handle_ ? handle_->over(std::move(unsharded)) : nullptr;
  }

  /// `place` shows this parameter from now on, the sharded one first.
  void add_place(const PyEntry& place) { entries_.add(place, sharded_.parameter()); }
  const ParamEntries& entries() const { return entries_; }
  /// True if `tensor` is one of them.
  bool has(const at::Tensor& tensor) const;
  bool is_one(const PyObject* object) const {
    return object != nullptr && (object == sharded_.parameter().get() || object == computed().get() ||
                                 object == post_forward_.get() || object == full_.get());
  }
  /// A user has put another parameter in a place of it.
  bool is_replaced() const {
    return entries_.any_now([this](PyObject* now) { return !is_one(now) && is_parameter(now); });
  }

  void show_sharded() const;
  void show_unsharded() const;
  void show_post_forward() const { show(post_forward_); }
  /// Shows the unsharded parameter, which is an ordinary tensor (FullParameters), from now on, whatever else is to be shown.
  void show_full();
  /// Shows the sharded one again, also where a user has put something else.
  void end_full();
  bool is_full() const { return static_cast<bool>(full_); }
  /// What a user has put in its place; undefined: nothing.
  at::Tensor in_place_of_full() const;

  /// Null until it is made.
  const PyRef& post_forward() const { return post_forward_; }
  void make_post_forward(const FSDPParam& param, const PostForwardMesh& mesh, const DTensorMaker& maker);
  void drop_post_forward() { post_forward_ = PyRef(); }

 private:
  /// What the tables hold inside forward.
  const PyRef& computed() const { return handle_ ? handle_->parameter() : unsharded_; }
  void show(const PyRef& parameter) const;

  const ShardedDTensor& sharded_;
  PyRef unsharded_;
  std::unique_ptr<ComputeHandle> handle_;
  PyRef post_forward_;
  PyRef full_;  ///< null but for the length of FullParameters
  ParamEntries entries_;
};

}  // namespace fsdp::python
