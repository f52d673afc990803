#pragma once

#include "sharded_module/sharded_module.hpp"

namespace fsdp::python {

/// What deepcopy has not copied: shards the copy of a Python module like the module.
///
/// sharded: the module's and those below it. memo: deepcopy's, in which each parameter's two forms (sharded() and
/// unsharded()) have their copies by id: a DTensor, which the copy's tables hold, and a plain parameter of the whole
/// size, which becomes its unsharded parameter. Returns the copy's, in the order of `sharded`.
std::vector<std::shared_ptr<ShardedModule>> copy_sharded(const py::object& module, const py::object& copy,
                                                         const std::vector<std::shared_ptr<ShardedModule>>& sharded,
                                                         const py::dict& memo, const py::object& is_left_out);

}  // namespace fsdp::python
