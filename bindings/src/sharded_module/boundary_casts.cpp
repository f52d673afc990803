#include "sharded_module/boundary_casts.hpp"

#include "dispatch/operand_cast.hpp"

namespace fsdp::python {

py::object cast_all(const BoundaryCasts& casts, py::object value, at::ScalarType dtype) {
  if (THPVariable_Check(value.ptr())) return py::cast(cast_floating(tensor_of(value), dtype));
  return casts.apply(py::cpp_function([dtype](const at::Tensor& tensor) { return cast_floating(tensor, dtype); }), value);
}

}  // namespace fsdp::python
