#pragma once

#include "fsdp/fully_shard.hpp"
#include "py_ref.hpp"

namespace fsdp::python {

/// What the outermost forward of a root is called with goes to its device, where that is no CPU: tensors, and those in what
/// torch's FSDP looks into. False: nothing was to be moved.
bool move_inputs(const FSDPModule& module, py::tuple& args, py::dict& kwargs);

}  // namespace fsdp::python
