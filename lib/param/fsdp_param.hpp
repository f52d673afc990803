#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "param/autograd_settings.hpp"
#include "param/param_spec.hpp"
#include "param/sharded_tensor.hpp"
#include "param/unsharded_tensor.hpp"

namespace fsdp {

/// One parameter with its tensors (Note [One parameter, three tensors]): the *unsharded parameter*, which the module's member
/// holds and `forward` reads, and the *sharded parameter*, which `parameters()` and the optimizer see. What concerns one of
/// them is a function of it; what keeps the two in step is here.
///
/// It keeps neither alive. The module keeps the sharded parameter, as before; the sharded parameter keeps the unsharded
/// one (a ParameterList has no member that would); the unsharded parameter's storage keeps the group. Not thread-safe: its
/// group's lock guards it.
struct FSDPParam {
  ParamSpec spec;
  UnshardedTensor unsharded;
  ShardedTensor sharded = {};
  AutogradSettings settings;
  bool has_moved_away = false;  ///< another group has taken it over: nothing is left here but the place

  /// Changes nothing yet. spec: its local sizes and dtype are filled in; its layout is of the parameter's sizes, with
  /// `kept_strides`.
  FSDPParam(ParamSpec spec, const at::Tensor& unsharded_param);

  const std::string& name() const { return spec.name; }
  const ShardLayout& layout() const { return spec.layout; }
  at::Tensor unsharded_param() const { return unsharded.tensor(); }  ///< undefined once the module is gone
  /// Returns this rank's rows; undefined once nobody can use them any more.
  at::Tensor local_tensor() const { return sharded.tensor(); }
  /// Returns what modules hold of it and users see: a DTensor around the rows, or the rows (ParamSpec::dtensor).
  at::Tensor sharded_param() const { return sharded.registered(); }
  bool requires_grad() const { return settings.requires_grad(); }
  const GradDtype& grad_dtype() const { return settings.grad_dtype(); }
  void rename(std::string name);

  /// Becomes what `other`, of another group, is: its sharded tensor, dtype and settings. Nothing of `other` changes, nor
  /// does the tensor before `make_sharded_param`.
  void take_identity(const FSDPParam& other);
  void move_away();

  /// Makes the sharded parameter on top of `piece`, whose memory it keeps alive.
  void make_sharded_param(OwnerLink link, size_t index, const at::Tensor& piece);
  /// Turns the tensor into the unsharded parameter. From here on the parameter is sharded.
  void attach(const std::shared_ptr<ParamOwner>& owner, c10::Device device);

  /// Moves the unsharded parameter's version, too, if the sharded parameter has been written since the last call, so that
  /// autograd refuses a backward through stale values as LibTorch does. To be called once per gather.
  void sync_version() {
    if (sharded.see_version()) unsharded.bump_version();
  }
  /// Notes that an operator has written the sharded parameter. The unsharded parameter's version follows at once: what autograd
  /// has saved is compared before any operator asks for a gather.
  void note_write() {
    if (sharded.note_write()) unsharded.bump_version();
  }
  /// Notes a write through the unsharded parameter: both hold the same values again.
  void mark_written();
  /// Notes a write through the unsharded parameter where the ranks may have written different values: what the sharded
  /// parameters hold is to be gathered.
  void mark_sharded_written();
  /// Puts the values of a sharded parameter whose storage or sizes were replaced (torch::load, set_data) back to `piece`.
  /// Accepts this rank's rows or the whole parameter; throws StateError otherwise.
  void reset_sharded_param(const at::Tensor& piece);

  /// Converts both tensors, which go on as the same tensors, to other dtypes, on `piece`'s device and `unsharded_device`.
  /// piece: this rank's rows in `dtype`, already there. The unsharded parameter is released. Values and gradients on the old
  /// memory are gone.
  void convert(at::ScalarType dtype, at::ScalarType param_dtype, const at::Tensor& piece,
               const std::shared_ptr<ParamOwner>& owner, c10::Device unsharded_device);
  /// Converts the unsharded parameter, which goes on as the same tensor, to another dtype, released. Its gradient is gone.
  void set_param_dtype(at::ScalarType param_dtype, const std::shared_ptr<ParamOwner>& owner, c10::Device unsharded_device);

  // See AutogradSettings.
  bool has_new_requires_grad() const {
    // One for both tensors.
    if (const auto& shared = sharded.shared(); shared && shared->requires_grad() == settings.requires_grad()) return false;
    return settings.has_new_requires_grad(unsharded.peek(), sharded.peek_registered());
  }
  bool sync_requires_grad() {
    return has_new_requires_grad() && settings.sync_requires_grad(unsharded.peek(), sharded.peek_registered());
  }
  bool sync_grad_dtype() { return settings.sync_grad_dtype(unsharded.peek(), sharded.peek_registered()); }
  /// Sets the grad_dtype of the unsharded parameter. Does nothing before `attach`, or once the tensor is gone.
  void set_unsharded_grad_dtype(const GradDtype& value);
};

}  // namespace fsdp
