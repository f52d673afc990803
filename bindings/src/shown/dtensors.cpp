#include "shown/dtensors.hpp"

#include <torch/csrc/autograd/python_variable.h>

namespace fsdp::python {

namespace {

PyObject* local_tensor_name() {
  static PyObject* name = PyUnicode_InternFromString("_local_tensor");
  return name;
}

PyObject* spec_name() {
  static PyObject* name = PyUnicode_InternFromString("_spec");
  return name;
}

/// Of the same sizes, strides and dtype in the same memory.
at::Tensor plain_at_the_start(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::empty({0}, tensor.options()).set_(tensor.storage(), 0, tensor.sizes(), tensor.strides());
}

py::object construct(const DTensorMaker& maker, py::handle local, py::handle spec) {
  PyObject* const arguments[] = {maker.dtensor.ptr(), local.ptr(), spec.ptr(), Py_False};
  auto made = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(maker.construct.ptr(), arguments, std::size(arguments), nullptr));
  if (!made) throw py::error_already_set();
  return made;
}

}  // namespace

py::object dtensor_like(const DTensorMaker& maker, const at::Tensor& local, py::handle like, py::handle spec) {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  if (local.storage_offset() == 0) return construct(maker, object, spec);
  // A DTensor made over a tensor with an offset has it, too: it looks as if it had memory of its own, which deepcopy
  // then tries to copy.
  py::object at_the_start = py::getattr(like, local_tensor_name());
  const auto of_like = tensor_of(at_the_start);
  if (of_like.scalar_type() != local.scalar_type() || of_like.storage_offset() != 0)
    at_the_start = py::cast(plain_at_the_start(local));
  auto made = construct(maker, at_the_start, spec);
  check_status(PyObject_SetAttr(made.ptr(), local_tensor_name(), object.ptr()));
  return made;
}

py::object dtensor_like(const DTensorMaker& maker, const at::Tensor& local, py::handle like) {
  return dtensor_like(maker, local, like, maker.in_dtype(spec_of(like), py::cast(local.scalar_type())));
}

py::object spec_of(py::handle dtensor) { return py::getattr(dtensor, spec_name()); }

bool is_parameter(PyObject* object) {
  if (object == nullptr || object == Py_None || !THPVariable_Check(object)) return false;
  const int is = PyObject_IsInstance(object, ParameterClass);
  if (is < 0) throw py::error_already_set();
  return is != 0;
}

bool is_dtensor(py::handle tensor) {
  return THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl()->is_python_dispatch() &&
         py::hasattr(tensor, local_tensor_name());
}

bool is_gathered_by_hooks(py::handle tensor) {
  if (THPVariable_CheckExact(tensor.ptr())) return false;
  const bool is_wrapper = py::hasattr(tensor, "__tensor_flatten__") && py::hasattr(tensor, "__tensor_unflatten__");
  return is_wrapper || py::hasattr(tensor, "fsdp_pre_all_gather");
}

at::Tensor local_tensor_of(py::handle dtensor) { return tensor_of(py::getattr(dtensor, local_tensor_name())); }

void set_local_tensor(py::handle dtensor, const at::Tensor& local) {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  check_status(PyObject_SetAttr(dtensor.ptr(), local_tensor_name(), object.ptr()));
}

}  // namespace fsdp::python
