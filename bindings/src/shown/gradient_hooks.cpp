#include "shown/gradient_hooks.hpp"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "root/find_param.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

namespace autograd_impl = torch::autograd::impl;

/// A hook may look at other parameters of its group, on their modules too, and step them.
void show_group_of(ShownParam& param) {
  if (param.gradient().is_shown()) return;
  const auto found = find_param(param.sharded().local_tensor());
  if (!found) return;
  for (const auto& each : found->group->params())
    if (const auto shown = each.has_moved_away ? nullptr : shown_registry().find(each.local_tensor()))
      shown->show_gradient();
}

/// On a sharded parameter: the core calls it when it has put a gradient there or added to it, and so for all that
/// have one of the group.
class GradientWatch final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientWatch(std::weak_ptr<ShownParam> shown) : shown_(std::move(shown)) {}
  void operator()(const torch::autograd::Variable&) override {
    py::gil_scoped_acquire gil;
    const auto shown = shown_.lock();
    if (!shown) return;
    show_group_of(*shown);
    run_gradient_hooks(shown->sharded());
    shown->gradient().take_over();
  }

 private:
  std::weak_ptr<ShownParam> shown_;
};

}  // namespace

bool has_gradient_hooks(const ShardedDTensor& param) {
  return autograd_impl::get_autograd_meta(param.tensor()) != nullptr &&
         autograd_impl::post_acc_grad_hooks(param.tensor()) != nullptr;
}

void run_gradient_hooks(const ShardedDTensor& param) {
  const auto parameter = param.object();
  const auto hooks = py::getattr(parameter, "_post_accumulate_grad_hooks", py::none());
  if (hooks.is_none()) return;
  for (const auto& hook : py::list(hooks.attr("values")())) hook(parameter);
}

void run_gradient_hooks_in_backward(ShownParam& param) {
  const auto& local_tensor = param.sharded().local_tensor();
  autograd_impl::materialize_autograd_meta(local_tensor);
  autograd_impl::set_post_acc_grad_hooks(local_tensor, std::make_unique<GradientWatch>(param.weak_from_this()));
}

}  // namespace fsdp::python
