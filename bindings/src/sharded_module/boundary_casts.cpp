#include "sharded_module/boundary_casts.hpp"

namespace fsdp::python {

namespace {

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && at::isFloatingType(tensor.scalar_type()) ? tensor.to(dtype) : tensor;
}

}  // namespace

py::object cast_all(const BoundaryCasts& casts, py::object value, at::ScalarType dtype) {
  if (THPVariable_Check(value.ptr())) return py::cast(cast(tensor_of(value), dtype));
  return casts.apply(py::cpp_function([dtype](const at::Tensor& tensor) { return cast(tensor, dtype); }), value);
}

}  // namespace fsdp::python
