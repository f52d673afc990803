#include "py_ref.hpp"

#include <torch/csrc/autograd/python_variable.h>

namespace fsdp::python {

at::Tensor tensor_of(py::handle object) {
  if (object.is_none()) return {};
  // Of the type itself: THPVariable_Check asks a subclass's metaclass, which takes 700 instructions.
  if (!PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(THPVariableClass)))
    throw py::type_error("expected a torch.Tensor, found " +
                         py::str(py::type::of(object).attr("__name__")).cast<std::string>());
  return THPVariable_Unpack(object.ptr());
}

std::string name_of(py::handle key) {
  if (!py::isinstance<py::str>(key))
    throw py::type_error("expected the names of a module's parameters, buffers and modules to be strings, found " +
                         py::repr(key).cast<std::string>());
  return key.cast<std::string>();
}

}  // namespace fsdp::python
