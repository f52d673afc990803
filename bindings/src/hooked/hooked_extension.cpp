#include "hooked/hooked_extension.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "base/log.hpp"

namespace fsdp::python {

namespace {

/// While it lives, a user's hook sees operators as it does anywhere. Below autograd a subclass would be asked for `to`, which
/// it knows as `_to_copy`.
class AboveAutograd {
 public:
  AboveAutograd() {
    auto keys = saved_;
    keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  ~AboveAutograd() { c10::impl::_force_tls_local_dispatch_key_set(saved_); }
  AboveAutograd(const AboveAutograd&) = delete;
  AboveAutograd& operator=(const AboveAutograd&) = delete;

 private:
  const c10::impl::LocalDispatchKeySet saved_ = c10::impl::tls_local_dispatch_key_set();
};

}  // namespace

void HookedExtension::prepare() {
  py::gil_scoped_acquire gil;
  const AboveAutograd above;
  bytes_ = hooked_.object().attr("prepare")().cast<int64_t>();
}

void HookedExtension::pre_all_gather(const at::Tensor&, const at::Tensor& encoded) const {
  py::gil_scoped_acquire gil;
  hooked_.object().attr("write")(encoded);
}

void HookedExtension::post_all_gather(const at::Tensor& encoded, at::ScalarType, const at::Tensor&) const {
  py::gil_scoped_acquire gil;
  const auto hooked = hooked_.object();
  hooked.attr("read")(encoded);  // below autograd: tensors that it has saved are filled again
  const AboveAutograd above;
  hooked.attr("finish")();
}

void HookedExtension::release() noexcept {
  if (!is_interpreter_alive()) return;
  py::gil_scoped_acquire gil;
  try {
    hooked_.object().attr("release")();
  } catch (const std::exception& error) {
    log().error("{}: releasing its unsharded values failed: {}", name_, error.what());
  }
}

}  // namespace fsdp::python
