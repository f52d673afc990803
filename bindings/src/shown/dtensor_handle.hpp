#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "shown/dtensors.hpp"

namespace fsdp::python {

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
