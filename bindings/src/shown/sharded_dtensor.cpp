#include "shown/sharded_dtensor.hpp"

#include <ATen/core/grad_mode.h>

#include "api/params/find_param.hpp"
#include "param/grad_dtype.hpp"
#include "root/group_port.hpp"

namespace fsdp::python {

ShardedDTensor::ShardedDTensor(at::Tensor local_tensor, py::object dtensor)
    : local_tensor_(std::move(local_tensor)),
      dtensor_(std::move(dtensor)),
      holds_subclass_(is_gathered_by_hooks(dtensor_.object().attr("_local_tensor"))),
      home_(local_tensor_.storage().unsafeGetStorageImpl()) {
  set_grad_dtype(tensor(), grad_dtype_of(local_tensor_));
}

void ShardedDTensor::take_over_requires_grad() const {
  const bool asked = tensor().requires_grad();
  if (asked != local_tensor_.requires_grad()) local_tensor_.set_requires_grad(asked);
}

void ShardedDTensor::show_requires_grad() const {
  const bool known = local_tensor_.requires_grad();
  if (tensor().requires_grad() != known) tensor().set_requires_grad(known);
}

void ShardedDTensor::follow_requires_grad() const {
  if (tensor().requires_grad() == local_tensor_.requires_grad()) return;
  const auto param = find_param(local_tensor_);
  if (!param || is_backward(root_of(*param->group).step().state())) return;
  take_over_requires_grad();
  param->group->changes().sync_requires_grad();
}

void ShardedDTensor::take_over_grad_dtype() const {
  const auto asked = grad_dtype_of(tensor()), known = grad_dtype_of(local_tensor_);
  if (asked == known) return;
  if (asked.is_set)
    set_grad_dtype(local_tensor_, asked);
  else
    set_grad_dtype(tensor(), known);
}

void ShardedDTensor::take_over_values() const {
  const auto shown = local();
  if (holds_subclass_ || shown.is_alias_of(local_tensor_)) return;
  at::NoGradGuard no_grad;
  at::Tensor(local_tensor_).copy_(shown);
}

at::Tensor ShardedDTensor::values_in(const at::Tensor& data, const std::string& name) const {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(data));
  if (!holds_subclass_ && is_dtensor(object)) {
    const auto is_same = [&](const char* what) { return object.attr(what).equal(dtensor_.object().attr(what)); };
    if (is_same("placements") && is_same("device_mesh") && data.sizes() == tensor().sizes())
      return local_tensor_of(object).detach();
  } else if (!holds_subclass_ && !data.unsafeGetTensorImpl()->is_python_dispatch() && data.sizes() == tensor().sizes()) {
    return data.detach();
  }
  TORCH_CHECK_TYPE(
      false, "parameter '", name, "': its .data was set to ", std::string(py::str(py::type::of(object))), " of sizes ",
      data.sizes(),
      "; expected a DTensor with the parameter's mesh, placements and sizes, or the whole parameter as an "
      "ordinary tensor. Write values with copy_ under torch.no_grad(), or load_state_dict. The old values are still there");
}

void ShardedDTensor::point_home() {
  // An ordinary tensor, which operators inside forward do not take for the whole, and an optimizer's need not
  // be looked at; with the same memory and version counter, so that its writes are seen.
  if (!holds_subclass_) set_local_tensor(dtensor_.get(), plain_view(local_tensor_));
  home_ = local_tensor_.storage().unsafeGetStorageImpl();
}

}  // namespace fsdp::python
