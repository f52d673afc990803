#pragma once

#include "sharded_module/sharded_module.hpp"

namespace fsdp::python {

/// What the extension needs of the Python side; set once, when the package is imported.
struct PythonSide {
  DTensorMaker dtensors;
  py::object mirrors;        ///< a dictionary with weak keys: module -> Mirror
  py::object local_tensors;  ///< a dictionary with weak keys, for Mirrors
  py::object stand_in;       ///< (parameter) -> tensor: for Mirrors
  py::object is_in_functional_call;  ///< () -> bool: this thread is inside torch.func.functional_call
};
PythonSide& python_side();

/// fully_shard on `modules` (in Python's depth-first order; one inside another counts once). placer: the Python
/// side's class of that name, which knows where each parameter goes. Nothing has changed if it throws.
std::shared_ptr<ShardedModule> shard(const py::list& modules, const py::object& placer, const py::dict& arguments);

}  // namespace fsdp::python
