#pragma once

#include <compare>
#include <string>

#include "py_ref.hpp"

namespace fsdp::python {

/// One entry of a Python module's `_parameters`.
struct PyEntry {
  PyObject* table;  ///< the dict, which the module keeps
  std::string name;
  auto operator<=>(const PyEntry&) const = default;
};

}  // namespace fsdp::python
