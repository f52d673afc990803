#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace fsdp {

/// Note [Building on meta]
/// With the residency key included for a thread (fsdp::MetaDevice), the fallback sees every
/// operator that runs there. Those that make a tensor out of sizes alone, for a device that the
/// caller leaves open, get the meta device. An operator that takes a tensor follows that tensor's
/// device, and an explicit device is what the caller wants.
void place_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// An operator that takes no tensor makes one out of sizes, and so on a device that it is told.
bool takes_tensors(const c10::FunctionSchema& schema);

}  // namespace fsdp
