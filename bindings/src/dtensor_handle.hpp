#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "py_ref.hpp"

namespace fsdp::python {

/// How DTensors are made and read; functions of the Python side, as DTensor's constructor is.
struct DTensorMaker {
  py::object make_gradient;   ///< (local, parameter) -> DTensor
  py::object make_unsharded;  ///< (local, like: the parameter's DTensor, requires_grad) -> nn.Parameter
  /// (local, mesh, dimension that is cut, (sizes, strides) of the whole, requires_grad) -> nn.Parameter
  py::object make_post_forward;
  /// (gradient: a DTensor, placements) -> the local tensor of it placed so; None among them: as it comes.
  py::object local_gradient;
  py::object replicates_ordinary;  ///< () -> bool: DTensor takes ordinary tensors as replicated at the moment
};

/// What modules compute with where the parameter was a DTensor before fully_shard (tensor parallelism): a DTensor
/// parameter over the unsharded parameter's memory. Operators on it reach the unsharded parameter below autograd (see Note [Inner residency
/// key]), so that its gradient arrives here, and is handed on to the unsharded parameter as if autograd had brought it there.
///
/// Every function needs the interpreter's lock.
class DTensorHandle {
 public:
  /// like: the DTensor that the module held. gradient_placements: those that a gradient is to come in.
  DTensorHandle(at::Tensor handle, py::object like, py::object gradient_placements, const DTensorMaker& maker);

  /// The nn.Parameter, which is another one after the unsharded parameter's memory or dtype has changed.
  const PyRef& parameter() const { return parameter_; }
  /// The same over another unsharded parameter.
  std::unique_ptr<DTensorHandle> over(at::Tensor handle) const {
    return std::make_unique<DTensorHandle>(std::move(handle), like_.object(), gradient_placements_.object(), maker_);
  }
  /// Takes over what has changed of the unsharded parameter since the last call.
  void follow();

 private:
  void make();

  at::Tensor handle_;
  PyRef like_, gradient_placements_, parameter_;
  const c10::StorageImpl* home_ = nullptr;
  const DTensorMaker& maker_;
};

}  // namespace fsdp::python
