#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <vector>

#include "py_ref.hpp"

namespace fsdp::python {

/// What happens at the boundary of a module's forward beside the core's work.
struct BoundaryCasts {
  std::optional<at::ScalarType> inputs, outputs;
  std::vector<bool> is_exempt;  ///< by module: its inputs are its own hooks' business
  py::object apply;             ///< torch's own walk through nested containers: (function, value) -> value
};

/// Every floating-point tensor in `value`, however deep, in `dtype`.
py::object cast_all(const BoundaryCasts& casts, py::object value, at::ScalarType dtype);

/// Calls `visit` with every tensor in a module's output.
template <class Visit>
void for_tensors(const BoundaryCasts& casts, py::handle value, const Visit& visit) {
  const RecursionLevel level(" while looking for tensors in a module's output");
  if (THPVariable_Check(value.ptr())) {
    visit(THPVariable_Unpack(value.ptr()));
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const auto& element : value) for_tensors(casts, element, visit);
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& [key, element] : py::reinterpret_borrow<py::dict>(value)) for_tensors(casts, element, visit);
  } else if (py::hasattr(value, "__dataclass_fields__")) {
    casts.apply(py::cpp_function([&visit](py::object tensor) {
                  visit(tensor_of(tensor));
                  return tensor;
                }), value);
  }
}

}  // namespace fsdp::python
