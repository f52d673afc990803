#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "shown/param_forms.hpp"
#include "shown/param_user.hpp"
#include "shown/sharded_dtensor.hpp"
#include "shown/shown_gradient.hpp"

namespace fsdp::python {

/// A sharded parameter as Python shows it: its DTensor, the forms in which modules hold it, its gradient. Between the core
/// and them it carries what changes on either side.
///
/// The DTensor stands in for the unsharded parameter: see Note [Stand-ins].
///
/// Every function needs the interpreter's lock.
class ShownParam : public std::enable_shared_from_this<ShownParam> {
 public:
  /// Found in the registry from now on. The arguments are those of ShardedDTensor and ParamForms.
  static std::shared_ptr<ShownParam> make(at::Tensor local_tensor, py::object sharded, py::object unsharded,
                                          std::unique_ptr<ComputeHandle> handle, const DTensorMaker& maker);
  ~ShownParam();

  const ShardedDTensor& sharded() const { return sharded_; }
  const ParamForms& forms() const { return forms_; }
  ParamForms& forms() { return forms_; }
  ShownGradient& gradient() { return gradient_; }
  const DTensorMaker& maker() const { return maker_; }
  void set_user(std::weak_ptr<ParamUser> user) { user_ = std::move(user); }
  std::shared_ptr<ParamUser> user() const { return user_.lock(); }

  /// It has got hooks that say how it is gathered, and modules compute with the handle from now on. The sharded one is shown.
  void gather_by_hooks(std::unique_ptr<ComputeHandle> handle);
  /// `place` shows this parameter from now on, the sharded one first.
  void add_place(const PyEntry& place);
  /// As shards of fewer ranks; a parameter that is not cut shows as it does outside.
  void show_post_forward(const PostForwardMesh& mesh);
  /// Another DTensor stands for it from now on, wherever one does. It may be another parameter's, too.
  void replace_sharded(py::object dtensor);
  /// Says whether its DTensor stands for another parameter, too; both have its values then.
  void settle_tie(bool is_tied);
  bool is_tied() const { return is_tied_; }

  /// `.data = data` of the DTensor: the parameter has these values from now on, and other tensors over its memory keep the old
  /// ones. data: a DTensor placed as the parameter is, or the whole as an ordinary tensor. TypeError for any other.
  void set_data(const at::Tensor& data);

  /// Takes over what the user has changed on the DTensor since the last call: requires_grad, grad_dtype, a gradient
  /// that was dropped or replaced, and values that were written into the memory of the parameter it is tied with.
  void take_over();
  /// Takes over hooks that the DTensor has got, and nothing else: they run where its gradient comes from then on, whatever
  /// tensor is behind it.
  void take_over_hooks();
  /// Puts the sharded parameter's gradient on the DTensor.
  void show_gradient();

  /// The sharded parameter holds the values: the DTensor shows its memory again.
  void point_home();

 private:
  ShownParam(at::Tensor local_tensor, py::object sharded, py::object unsharded, std::unique_ptr<ComputeHandle> handle,
             const DTensorMaker& maker);
  void stand_in(const PyRef& dtensor);
  void take_over_tied_values();

  ShardedDTensor sharded_;
  ParamForms forms_;
  ShownGradient gradient_;
  bool runs_hooks_in_backward_ = false;
  bool is_tied_ = false;  ///< its DTensor stands for another parameter, too, and shows the memory of one
  int64_t seen_tied_version_ = -1;
  std::weak_ptr<ParamUser> user_;
  const DTensorMaker& maker_;
};

/// Shows the sharded parameter's memory again if that is another one than when the DTensor was made.
inline void follow_home(ShownParam& param) {
  if (!param.sharded().is_home()) param.point_home();
}

}  // namespace fsdp::python
