#pragma once

#include "shown/shown_param.hpp"

namespace fsdp::python {

/// Operators that have ordinary tensors beside `dtensor`, one that shows `param` as a shard, get the unsharded parameter.
/// See Note [Stand-ins].
void stand_in_for(ShownParam& param, const PyRef& dtensor);

}  // namespace fsdp::python
