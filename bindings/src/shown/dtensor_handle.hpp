#pragma once

#include "shown/compute_handle.hpp"

namespace fsdp::python {

/// What modules compute with where the parameter was a DTensor before fully_shard (tensor parallelism): a DTensor
/// parameter over the unsharded parameter's memory, or a plain one where spmd_types annotates it. Operators on it reach
/// the unsharded parameter below autograd (see Note [Inner residency key]), so that its gradient arrives here.
class DTensorHandle final : public ComputeHandle {
 public:
  /// like: the DTensor that the module held, or a plain parameter's annotation. gradient_placements: those that a gradient
  /// is to come in, or the annotation, which knows them.
  DTensorHandle(at::Tensor handle, py::object like, py::object gradient_placements, const DTensorMaker& maker);

  std::unique_ptr<ComputeHandle> over(at::Tensor handle) const override {
    return std::make_unique<DTensorHandle>(std::move(handle), like_.object(), gradient_placements().object(), maker());
  }
  /// The parameter is another one after the unsharded parameter's memory or dtype has changed.
  void follow() override;
  py::object over_full() const override {
    return maker().make_unsharded(handle().detach(), like_.object(), handle().requires_grad());
  }

 private:
  void make();

  PyRef like_;
  const c10::StorageImpl* home_ = nullptr;
};

}  // namespace fsdp::python
