#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "py_ref.hpp"
#include "shown/dtensors.hpp"

namespace fsdp::python {

/// What modules compute with where that is not the unsharded parameter: a parameter that stands for it. A gradient that
/// autograd brings there is handed on to the unsharded parameter, as if autograd had brought it there.
///
/// Every function needs the interpreter's lock.
class ComputeHandle {
 public:
  virtual ~ComputeHandle() = default;

  /// The nn.Parameter; null until it is there.
  const PyRef& parameter() const { return parameter_; }
  /// Makes a handle of the same kind over another unsharded parameter.
  virtual std::unique_ptr<ComputeHandle> over(at::Tensor handle) const = 0;
  /// Takes over what has changed of the unsharded parameter since the last call.
  virtual void follow() = 0;
  /// Modules show the sharded parameter.
  virtual void rest() {}
  /// What stands for the unsharded parameter's memory while that is an ordinary tensor (FullParameters).
  virtual py::object over_full() const = 0;

 protected:
  /// handle: the unsharded parameter. gradient_placements: those that a DTensor's gradient is to come in; None: it is no
  /// DTensor.
  ComputeHandle(at::Tensor handle, py::object gradient_placements, const DTensorMaker& maker)
      : handle_(std::move(handle)), gradient_placements_(std::move(gradient_placements)), maker_(maker) {}
  const at::Tensor& handle() const { return handle_; }
  const PyRef& gradient_placements() const { return gradient_placements_; }
  const DTensorMaker& maker() const { return maker_; }
  /// `parameter` is it from now on.
  void set_parameter(py::object parameter);
  /// What the user has asked of the unsharded parameter holds for it.
  void follow_settings() const;

 private:
  at::Tensor handle_;
  PyRef gradient_placements_, parameter_;
  const DTensorMaker& maker_;
};

}  // namespace fsdp::python
