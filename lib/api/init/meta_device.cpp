#include "fsdp/meta_device.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "dispatch/residency.hpp"

// See Note [Building on meta].
namespace fsdp {

MetaDevice::MetaDevice() : was_included_(c10::impl::tls_is_dispatch_key_included(kResidencyKey)) {
  c10::impl::tls_set_dispatch_key_included(kResidencyKey, true);
}

MetaDevice::~MetaDevice() {
  c10::impl::tls_set_dispatch_key_included(kResidencyKey, was_included_);
}

}  // namespace fsdp
