#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fsdp {

/// Runs an operator that has stand-ins among its operands: see Note [Stand-ins]. keys: below the residency key.
void call_with_stand_ins(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace fsdp
