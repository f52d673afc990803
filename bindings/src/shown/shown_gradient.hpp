#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "shown/param_entries.hpp"
#include "shown/sharded_dtensor.hpp"

namespace fsdp::python {

/// A sharded parameter's gradient as Python shows it: the `.grad` of the parameter's DTensor, a DTensor over the gradient.
///
/// Every function needs the interpreter's lock.
class ShownGradient {
 public:
  /// All outlive it. entries: name the parameter in errors.
  ShownGradient(const ShardedDTensor& param, const ParamEntries& entries, const DTensorMaker& maker)
      : param_(param), entries_(entries), maker_(maker) {}
  /// self: keeps what this is a part of. Before the first gradient.
  void set_self(std::weak_ptr<ShownGradient> self) { self_ = std::move(self); }

  /// Takes over what the user has made of it since the last call: dropped it, or put another there.
  void take_over();
  /// Puts the sharded parameter's gradient on the DTensor. True if that was not there, or another one.
  bool show();
  /// True if the DTensor has the sharded parameter's.
  bool is_shown() const;

  /// Another DTensor stands for the parameter: the gradient that was shown stays with the one before, and the one that this
  /// DTensor has counts.
  void follow_replaced();
  /// The one whose gradient `tensor` shows; null if it is none's.
  static std::shared_ptr<ShownGradient> of(const at::Tensor& tensor);
  /// `.data = data` of the DTensor that shows it. data: a DTensor placed as the gradient is. TypeError for any other.
  void set_data(const at::Tensor& data);

  /// Takes over what the user has made of the gradient, and takes it off the DTensor until `bring_back`. Does nothing if it is
  /// aside already. Call it before `nn.Module._apply`, which puts another tensor, without a grad_dtype, behind the parameter,
  /// and fails on, and loses, a gradient of another dtype than the parameter's.
  void set_aside();
  /// Undefined: it is not aside.
  const at::Tensor& aside() const { return aside_; }
  void bring_back();
  /// The sharded parameter lies in other memory: the gradient goes with it, unless the user has dropped it since it was shown.
  void follow_home();

 private:
  class End;
  bool is_ours() const;
  void put(const at::Tensor& gradient);
  void take_autograds_own(const at::Tensor& gradient);
  void follow(const at::Tensor& gradient, const at::Tensor& local);
  void forget() { dtensor_ = local_ = nullptr; }
  py::handle spec_for(at::ScalarType dtype);

  const ShardedDTensor& param_;
  const ParamEntries& entries_;
  const DTensorMaker& maker_;
  std::weak_ptr<ShownGradient> self_;
  /// The DTensor that was last on the parameter's as its gradient; whoever drops it gives the memory back, so nothing here
  /// keeps it, and End tells when it has gone.
  const c10::TensorImpl* dtensor_ = nullptr;
  const c10::TensorImpl* local_ = nullptr;  ///< the sharded parameter's, which it shows
  at::Tensor aside_;
  /// The next gradient is as the last one in most steps: the last one's spec, and of which parameter's it was made.
  struct Spec {
    PyRef of, spec;
    std::optional<at::ScalarType> dtype;
  } last_;
};

}  // namespace fsdp::python
