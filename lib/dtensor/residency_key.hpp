#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

namespace fsdp {

/// Note [Residency key]
/// Unsharded and sharded parameters and DTensors carry a dispatch key that no LibTorch kernel uses. A
/// fallback on that key sees every operator that touches one of them, or a view of one (views copy
/// key sets and share storage), in forward and in backward, above autograd and autocast. It makes
/// the groups of all operands readable, and hands on to the operator itself with the key excluded,
/// so that the parts of a LibTorch operator are not examined again.
///
/// The key is one of the process-wide registrations that a library can make only once: two copies of
/// libfsdp in one process do not load.
inline constexpr auto kResidencyKey = c10::DispatchKey::DeferredInit;

inline bool has_residency_key(const c10::TensorImpl* impl) {
  return impl->key_set().has(kResidencyKey);
}

void add_key(const at::Tensor& tensor, c10::DispatchKey key);
inline void add_residency_key(const at::Tensor& tensor) { add_key(tensor, kResidencyKey); }
void remove_residency_key(const at::Tensor& tensor);

}  // namespace fsdp
