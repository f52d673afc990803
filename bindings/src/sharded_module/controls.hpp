#pragma once

#include <vector>

#include "sharded_module/sharded_module.hpp"

namespace fsdp::python {

using PySharded = py::class_<ShardedModule, std::shared_ptr<ShardedModule>>;
using Modules = std::vector<std::shared_ptr<ShardedModule>>;

/// Returns the FSDPModule of each module that Python gives. Throws TypeError for None.
std::vector<FSDPModule> controls_of(const Modules& modules);

/// FSDP2's controls, and this library's own.
void define_controls(PySharded& module);

}  // namespace fsdp::python
