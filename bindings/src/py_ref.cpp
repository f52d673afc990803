#include "py_ref.hpp"

#include <torch/csrc/autograd/python_variable.h>

namespace fsdp::python {

at::Tensor tensor_of(py::handle object) {
  if (object.is_none()) return {};
  if (!THPVariable_Check(object.ptr()))
    throw py::type_error("expected a torch.Tensor, found " +
                         py::str(py::type::of(object).attr("__name__")).cast<std::string>());
  return THPVariable_Unpack(object.ptr());
}

bool is_dtensor(py::handle tensor) {
  return THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl()->is_python_dispatch() &&
         py::hasattr(tensor, "_local_tensor");
}

}  // namespace fsdp::python
