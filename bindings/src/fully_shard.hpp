#pragma once

#include "sharded_module.hpp"

namespace fsdp::python {

/// What the extension needs of the Python side; set once, when the package is imported.
struct PythonSide {
  DTensorMaker dtensors;
  py::object mirrors;      ///< a dictionary with weak keys: module -> Mirror
  py::object is_left_out;  ///< (module) -> bool: another composable API owns it
  py::object placements;   ///< (mesh, the dimension that is cut or None) -> placements
};
PythonSide& python_side();

/// fully_shard on `modules` (in Python's depth-first order; one inside another counts once). mesh: torch's, as
/// the DTensors name it; `core_mesh` is the same for the core. Nothing has changed if it throws.
std::shared_ptr<ShardedModule> shard(const py::list& modules, const py::object& mesh, const DeviceMesh& core_mesh,
                                     const py::dict& arguments);

}  // namespace fsdp::python
