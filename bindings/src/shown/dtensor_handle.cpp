#include "shown/dtensor_handle.hpp"

#include "dispatch/residency.hpp"

namespace fsdp::python {

DTensorHandle::DTensorHandle(at::Tensor handle, py::object like, py::object gradient_placements,
                             const DTensorMaker& maker)
    : ComputeHandle(std::move(handle), std::move(gradient_placements), maker), like_(std::move(like)) {
  make();
}

void DTensorHandle::make() {
  const auto inner = handle().detach();
  add_inner_residency_key(inner);
  home_ = handle().storage().unsafeGetStorageImpl();
  set_parameter(maker().make_unsharded(inner, like_.object(), handle().requires_grad()));
}

void DTensorHandle::follow() {
  const auto shown = tensor_of(parameter().object());
  if (handle().storage().unsafeGetStorageImpl() != home_ || shown.dtype() != handle().dtype()) return make();
  follow_settings();
}

}  // namespace fsdp::python
