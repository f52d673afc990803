#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

#include "dtensor/residency_key.hpp"

namespace fsdp {

/// Note [Inner residency key]
/// A wrapper subclass (a DTensor) does its work in __torch_dispatch__, where all keys above Python's are excluded,
/// the residency key among them: an operator on the wrapper's inner tensor would pass it by. So an inner tensor
/// carries a second key, below Python's, that LibTorch reserves and does not use, with the same fallback.
inline constexpr auto kInnerResidencyKey = c10::DispatchKey::CustomRNGKeyId;

/// For an unsharded parameter's alias that a wrapper subclass is to hold. Makes the second fallback known the first time.
void add_inner_residency_key(const at::Tensor& alias);

/// While it lives, operators on this thread pass the fallback by: for the runtime's own work on
/// shards and unsharded parameters. Also turns autograd and inference mode off, and hides that work from Python's
/// dispatch modes: selective checkpointing expects the same operators when it runs a part again, where
/// other groups may have to be gathered than the first time.
class BelowResidency {
 public:
  BelowResidency() : no_inference_(leave_inference()), below_(keys_below()) {}

 private:
  // Most often there is no such mode, and to turn it off costs more than all else here.
  static std::optional<c10::InferenceMode> leave_inference() {
    return c10::InferenceMode::is_enabled() ? std::optional<c10::InferenceMode>(std::in_place, false) : std::nullopt;
  }
  static c10::impl::LocalDispatchKeySet keys_below() {
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = keys.excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kResidencyKey);
    // Not excluded: tensors that are Python classes keep working in hooks of the user's.
    keys.included_ = keys.included_ - c10::DispatchKeySet({c10::DispatchKey::Python,
                                                           c10::DispatchKey::PythonTLSSnapshot});
    return keys;
  }

  std::optional<c10::InferenceMode> no_inference_;
  c10::impl::ForceDispatchKeyGuard below_;
};

}  // namespace fsdp
