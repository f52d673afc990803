#include "shown/dtensors.hpp"

#include <torch/csrc/autograd/python_variable.h>

namespace fsdp::python {

namespace {

PyObject* local_tensor_name() {
  static PyObject* name = PyUnicode_InternFromString("_local_tensor");
  return name;
}

}  // namespace

bool is_dtensor(py::handle tensor) {
  return THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl()->is_python_dispatch() &&
         py::hasattr(tensor, local_tensor_name());
}

bool has_gather_hooks(py::handle tensor) {
  return !THPVariable_CheckExact(tensor.ptr()) && py::hasattr(tensor, "fsdp_pre_all_gather");
}

at::Tensor local_tensor_of(py::handle dtensor) { return tensor_of(py::getattr(dtensor, local_tensor_name())); }

void set_local_tensor(py::handle dtensor, const at::Tensor& local) {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  check_status(PyObject_SetAttr(dtensor.ptr(), local_tensor_name(), object.ptr()));
}

}  // namespace fsdp::python
