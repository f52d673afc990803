#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fsdp {

/// The fallback of the residency key: see Note [Residency key] in residency.hpp.
void residency_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack);
/// Is the fallback of the inner key: see Note [Inner residency key].
void inner_residency_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Registers the latter, the first time: most programs have no use for it.
void make_inner_fallback_known();

}  // namespace fsdp
