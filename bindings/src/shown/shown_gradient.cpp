#include "shown/shown_gradient.hpp"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "root/find_param.hpp"

namespace fsdp::python {

/// Among a gradient's own hooks, which go when it does: the sharded parameter's `.grad`, the same memory, is
/// dropped there and then, and not when the next step begins.
class ShownGradient::End final : public torch::autograd::FunctionPreHook {
 public:
  End(std::weak_ptr<ShownGradient> shown, const c10::TensorImpl* gradient)
      : shown_(std::move(shown)), gradient_(gradient) {}
  ~End() override {
    if (!is_interpreter_alive()) return;
    const InterpreterLock lock;
    const auto shown = shown_.lock();
    if (!shown || shown->dtensor_ != gradient_) return;
    auto& of_sharded = shown->param_.local_tensor().mutable_grad();
    if (of_sharded.unsafeGetTensorImpl() == shown->local_) of_sharded.reset();
    shown->forget();
  }
  bool is_told(const ShownGradient& shown) const { return shown_.lock().get() == &shown; }
  std::shared_ptr<ShownGradient> told() const { return shown_.lock(); }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    return gradients;
  }

 private:
  std::weak_ptr<ShownGradient> shown_;
  const c10::TensorImpl* gradient_;
};

void ShownGradient::follow(const at::Tensor& gradient, const at::Tensor& local) {
  dtensor_ = gradient.unsafeGetTensorImpl();
  local_ = local.unsafeGetTensorImpl();
  auto& hooks = torch::autograd::impl::materialize_autograd_meta(gradient)->hooks_;
  const bool is_followed = std::any_of(hooks.begin(), hooks.end(), [this](const auto& hook) {
    const auto* end = dynamic_cast<const End*>(hook.get());
    return end != nullptr && end->is_told(*this);
  });
  if (!is_followed) hooks.push_back(std::make_unique<End>(self_, dtensor_));
}

bool ShownGradient::is_ours() const {
  const auto& gradient = param_.tensor().grad();
  return gradient.defined() && gradient.unsafeGetTensorImpl() == dtensor_;
}

bool ShownGradient::is_shown() const {
  return param_.local_tensor().grad().unsafeGetTensorImpl() == local_ && is_ours();
}

void ShownGradient::take_over() {
  if (aside_.defined()) return;
  const auto& gradient = param_.tensor().grad();
  if (!gradient.defined()) {
    // Where none was shown, what is there waits for the end of its step.
    if (local_ != nullptr) param_.local_tensor().mutable_grad().reset();
    forget();
    return;
  }
  if (is_ours()) return;
  // The user's own.
  py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  if (!is_dtensor(object))
    throw py::type_error("parameter '" + entries_.name() +
                         "': expected its .grad to be a DTensor like the parameter, found an ordinary tensor; make "
                         "one with torch.distributed.tensor.distribute_tensor");
  const auto local = local_tensor_of(object);
  param_.local_tensor().mutable_grad() = local;
  follow(gradient, local);
}

bool ShownGradient::show() {
  const auto gradient = param_.local_tensor().grad();
  if (!gradient.defined()) {
    if (local_ != nullptr) param_.tensor().mutable_grad().reset();
    forget();
    return false;
  }
  if (gradient.unsafeGetTensorImpl() == local_) {
    take_over();  // shown already, and left, dropped or replaced since: by a hook, say
    return false;
  }
  take_autograds_own(gradient);
  put(gradient);
  return true;
}

/// What a loss gave that is computed from the DTensor itself, beside the modules: autograd has put it on the DTensor
/// since the backward began.
void ShownGradient::take_autograds_own(const at::Tensor& gradient) {
  const auto& parameter = param_.tensor();
  if (!parameter.grad().defined() || is_ours()) return;
  const auto own = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.grad()));
  const auto local = tensor_of(maker_.local_gradient(own, param_.object().attr("placements")));
  at::NoGradGuard no_grad;
  if (const auto param = find_param(param_.local_tensor()))
    root_of(*param->group).runner().comm_ctx().let_current_wait_for_reductions();
  gradient.add_(local);
  parameter.mutable_grad().reset();
}

void ShownGradient::put(const at::Tensor& gradient) {
  const auto& parameter = param_.tensor();
  if (is_ours() && parameter.grad().dtype() == gradient.dtype() && parameter.grad().device() == gradient.device()) {
    // It is the parameter's, added up elsewhere.
    const auto shown = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.grad()));
    set_local_tensor(shown, gradient);
    local_ = gradient.unsafeGetTensorImpl();
    return;
  }
  forget();
  const auto made = dtensor_like(maker_, gradient, param_.parameter().get(), spec_for(gradient.scalar_type()));
  parameter.mutable_grad() = tensor_of(made);
  follow(parameter.grad(), gradient);
}

py::handle ShownGradient::spec_for(at::ScalarType dtype) {
  const auto of = spec_of(param_.parameter().get());
  if (of.ptr() != last_.of.get() || last_.dtype != dtype)
    last_ = {PyRef(of), PyRef(maker_.in_dtype(of, py::cast(dtype))), dtype};
  return last_.spec.get();
}

void ShownGradient::follow_replaced() {
  forget();
  param_.local_tensor().mutable_grad().reset();
  take_over();
}

std::shared_ptr<ShownGradient> ShownGradient::of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) return nullptr;
  for (const auto& hook : meta->hooks_)
    if (const auto* end = dynamic_cast<const End*>(hook.get())) {
      auto shown = end->told();
      if (shown && shown->dtensor_ == tensor.unsafeGetTensorImpl()) return shown;
    }
  return nullptr;
}

void ShownGradient::set_data(const at::Tensor& data) {
  const auto& gradient = param_.tensor().grad();
  const auto shown = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(data));
  const auto is_same = [&](const char* what) { return object.attr(what).equal(shown.attr(what)); };
  TORCH_CHECK_TYPE(
      is_dtensor(object) && is_same("placements") && is_same("device_mesh") && is_same("shape") && is_same("dtype"),
      "parameter '", entries_.name(),
      "': its gradient's .data was set to another kind of tensor; expected a DTensor with "
      "the gradient's mesh, placements, sizes and dtype. Put another gradient on the parameter (.grad = ...), or write "
      "with copy_");
  const auto local = local_tensor_of(object).detach();
  set_local_tensor(shown, local);
  param_.local_tensor().mutable_grad() = local;
  local_ = local.unsafeGetTensorImpl();
}

void ShownGradient::set_aside() {
  take_over();
  if (!aside_.defined()) aside_ = std::exchange(param_.tensor().mutable_grad(), {});
}

void ShownGradient::bring_back() {
  auto aside = std::exchange(aside_, {});
  auto& gradient = param_.tensor().mutable_grad();
  if (!gradient.defined()) gradient = std::move(aside);
}

void ShownGradient::follow_home() {
  const auto& local_tensor = param_.local_tensor();
  const auto& parameter = param_.tensor();
  if (local_ == nullptr) return forget();
  if (!parameter.grad().defined()) local_tensor.mutable_grad().reset();
  if (local_tensor.grad().defined()) return put(local_tensor.grad());
  parameter.mutable_grad().reset();
  forget();
}

}  // namespace fsdp::python
