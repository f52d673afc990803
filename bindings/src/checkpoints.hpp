#pragma once

#include "py_ref.hpp"

namespace fsdp::python {

/// The core's checkpoints of any tensors. Which tensors a model and an optimizer have is the package's to say.
void define_checkpoints(py::module_& module);

}  // namespace fsdp::python
