#include "hooked/hooked_handle.hpp"

#include "fsdp/error.hpp"

namespace fsdp::python {

std::unique_ptr<ComputeHandle> HookedHandle::over(at::Tensor) const {
  throw UsageError(py::str(hooked_.object().attr("name")).cast<std::string>() +
                   ": a sharded parameter with fsdp_pre_all_gather cannot be copied; copy the module before it is sharded");
}

void HookedHandle::follow() {
  const auto now = hooked_.object().attr("shown")();
  if (now.is_none())
    throw StateError(py::str(hooked_.object().attr("name")).cast<std::string>() + ": has not been gathered yet");
  if (now.ptr() != parameter().get())
    set_parameter(now);
  else
    follow_settings();
}

void HookedHandle::rest() { hooked_.object().attr("rest")(); }

}  // namespace fsdp::python
