#pragma once

#include <compare>
#include <string>

#include "py_ref.hpp"

namespace fsdp::python {

/// One entry of a Python module's `_parameters`.
struct Place {
  PyObject* table;  ///< the dict, which the module keeps
  std::string name;
  auto operator<=>(const Place&) const = default;
};

}  // namespace fsdp::python
