#pragma once

#include "sharded_module/controls.hpp"

namespace fsdp::python {

/// What a user sees of a run: reports, statistics, timelines, log lines.
void define_inspection(py::module_& module, PySharded& sharded);

}  // namespace fsdp::python
