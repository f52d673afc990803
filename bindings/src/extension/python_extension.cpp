#include "extension/python_extension.hpp"

#include <ATen/core/grad_mode.h>

namespace fsdp::python {

std::string PythonExtension::name() const {
  py::gil_scoped_acquire gil;
  return py::str(extension_.object().attr("name")()).cast<std::string>();
}

bool PythonExtension::accepts(at::ScalarType dtype) const {
  py::gil_scoped_acquire gil;
  return py::bool_(extension_.object().attr("accepts")(dtype));
}

int64_t PythonExtension::encoded_bytes(int64_t numel, at::ScalarType dtype) const {
  py::gil_scoped_acquire gil;
  const py::object bytes = extension_.object().attr("encoded_bytes")(numel, dtype);
  if (!py::isinstance<py::int_>(bytes))
    throw py::type_error(py::str(py::type::of(extension_.object()).attr("__name__")).cast<std::string>() +
                         ".encoded_bytes: expected an int, found " + py::repr(bytes).cast<std::string>());
  return bytes.cast<int64_t>();
}

void PythonExtension::pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const {
  py::gil_scoped_acquire gil;
  const at::NoGradGuard no_grad;
  extension_.object().attr("pre_all_gather")(piece, encoded);
}

void PythonExtension::post_all_gather(const at::Tensor& encoded, at::ScalarType dtype, const at::Tensor& values) const {
  py::gil_scoped_acquire gil;
  const at::NoGradGuard no_grad;
  extension_.object().attr("post_all_gather")(encoded, dtype, values);
}

std::shared_ptr<AllGatherExtension> extension_of(const py::object& given) {
  if (given.is_none()) return nullptr;
  if (py::hasattr(given, "_core")) return given.attr("_core").cast<std::shared_ptr<AllGatherExtension>>();
  return std::make_shared<PythonExtension>(given);
}

void define_extensions(py::module_& module) {
  py::class_<AllGatherExtension, std::shared_ptr<AllGatherExtension>> extension(module, "AllGatherExtension");
  not_made_by_python(extension)
      .def("name", &AllGatherExtension::name)
      .def("accepts", &AllGatherExtension::accepts)
      .def("encoded_bytes", &AllGatherExtension::encoded_bytes)
      .def("pre_all_gather", &AllGatherExtension::pre_all_gather)
      .def("post_all_gather", &AllGatherExtension::post_all_gather);
  module.def("int8_all_gather", &int8_all_gather);
}

}  // namespace fsdp::python
