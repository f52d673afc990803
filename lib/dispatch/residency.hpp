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
  BelowResidency() {
    auto keys = c10::impl::tls_local_dispatch_key_set();
    // Outside inference mode tensors' versions count. To ask for the mode itself, or to turn it off, costs more than all else
    // here.
    const bool may_infer = !keys.included_.has(c10::DispatchKey::ADInplaceOrView);
    if (!may_infer && keys.excluded_.has_all(kExcluded) && !keys.included_.has_any(kNotIncluded))
      return;  // another is about it
    if (may_infer && c10::InferenceMode::is_enabled()) {
      no_inference_.emplace(false);
      keys = c10::impl::tls_local_dispatch_key_set();
    }
    saved_ = keys;
    keys.excluded_ = keys.excluded_ | kExcluded;
    keys.included_ = keys.included_ - kNotIncluded;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  ~BelowResidency() {
    if (saved_) c10::impl::_force_tls_local_dispatch_key_set(*saved_);
  }
  BelowResidency(const BelowResidency&) = delete;
  BelowResidency& operator=(const BelowResidency&) = delete;

 private:
  static constexpr auto kExcluded =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kResidencyKey);
  // Not excluded: tensors that are Python classes keep working in hooks of the user's.
  static constexpr c10::DispatchKeySet kNotIncluded{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot};

  std::optional<c10::InferenceMode> no_inference_;
  std::optional<c10::impl::LocalDispatchKeySet> saved_;  // to be there again before the mode is
};

}  // namespace fsdp
