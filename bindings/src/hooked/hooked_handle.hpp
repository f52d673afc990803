#pragma once

#include "shown/compute_handle.hpp"

namespace fsdp::python {

/// The parameter that a HookedParameter's second hook has made. Its memory is that object's, which the group's gathers fill and
/// its release empties; where one rank holds all there is no gather, and the forms that modules show do it.
class HookedHandle final : public ComputeHandle {
 public:
  HookedHandle(at::Tensor handle, py::object hooked, const DTensorMaker& maker)
      : ComputeHandle(std::move(handle), py::none(), maker), hooked_(std::move(hooked)) {}

  std::unique_ptr<ComputeHandle> over(at::Tensor handle) const override;
  void follow() override;
  void rest() override;
  py::object over_full() const override { return py::none(); }  // FullParameters refuses it

 private:
  PyRef hooked_;
};

}  // namespace fsdp::python
