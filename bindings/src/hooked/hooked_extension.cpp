#include "hooked/hooked_extension.hpp"

#include "base/log.hpp"

namespace fsdp::python {

void HookedExtension::prepare() {
  py::gil_scoped_acquire gil;
  bytes_ = hooked_.object().attr("prepare")().cast<int64_t>();
}

void HookedExtension::pre_all_gather(const at::Tensor&, const at::Tensor& encoded) const {
  py::gil_scoped_acquire gil;
  hooked_.object().attr("write")(encoded);
}

void HookedExtension::post_all_gather(const at::Tensor& encoded, at::ScalarType, const at::Tensor&) const {
  py::gil_scoped_acquire gil;
  hooked_.object().attr("read")(encoded);
}

void HookedExtension::release() noexcept {
  if (!is_interpreter_alive()) return;
  py::gil_scoped_acquire gil;
  try {
    hooked_.object().attr("release")();
  } catch (const std::exception& error) {
    log().error("{}: releasing what was gathered: {}", name_, error.what());
  }
}

}  // namespace fsdp::python
