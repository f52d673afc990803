#include "shown/compute_handle.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "api/params/find_param.hpp"
#include "param/grad_dtype.hpp"

namespace fsdp::python {

namespace {

namespace autograd_impl = torch::autograd::impl;

/// Behind autograd's own accumulation in the parameter, in the thread that runs backward.
class HandsGradientOn final : public torch::autograd::PostAccumulateGradHook {
 public:
  HandsGradientOn(at::Tensor handle, py::object placements, const DTensorMaker& maker)
      : handle_(std::move(handle)), placements_(std::move(placements)), maker_(maker) {}

  void operator()(const at::Tensor& parameter) override {
    at::Tensor local = parameter.grad();
    {
      py::gil_scoped_acquire gil;
      if (!placements_.object().is_none()) local = tensor_of(maker_.local_gradient(local, placements_.object()));
    }
    parameter.mutable_grad().reset();
    // The library's own hook is behind it, and may wait for other ranks.
    (*autograd_impl::grad_accumulator(handle_))({std::move(local)});
  }

 private:
  at::Tensor handle_;
  PyRef placements_;
  const DTensorMaker& maker_;
};

/// What is reduced over other ranks than the library's first is to be in the dtype of that reduction: cast on arrival.
GradDtype grad_dtype_before(const at::Tensor& handle) {
  const auto of_unsharded = grad_dtype_of(handle);
  const auto param = of_unsharded.takes_any() ? find_param(handle) : std::nullopt;
  if (!param || param->group->gradients().dtypes.takes_any(param->index)) return of_unsharded;
  return {.is_set = true, .dtype = param->group->gradients().dtypes.reduce_dtype(param->index)};
}

}  // namespace

void ComputeHandle::set_parameter(py::object object) {
  parameter_ = PyRef(std::move(object));
  const auto parameter = tensor_of(parameter_.object());
  autograd_impl::materialize_autograd_meta(parameter);
  autograd_impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<HandsGradientOn>(handle_, gradient_placements_.object(), maker_));
  set_grad_dtype(parameter, grad_dtype_before(handle_));
}

void ComputeHandle::follow_settings() const {
  const auto parameter = tensor_of(parameter_.object());
  if (parameter.requires_grad() != handle_.requires_grad()) parameter.set_requires_grad(handle_.requires_grad());
  set_grad_dtype(parameter, grad_dtype_before(handle_));
}

}  // namespace fsdp::python
