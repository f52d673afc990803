#include "root/autograd/gradient_hook.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "root/group_port.hpp"

namespace fsdp {

namespace {

class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::shared_ptr<GroupPort> port, size_t index,
               std::unique_ptr<torch::autograd::PostAccumulateGradHook> user)
      : port_(std::move(port)), index_(index), user_(std::move(user)) {}

  void operator()(const at::Tensor& unsharded_param) override {
    if (user_) (*user_)(unsharded_param);
    const auto root = port_->root();
    root->gradient_arrived(port_->group(), index_, unsharded_param);
  }

  std::unique_ptr<torch::autograd::PostAccumulateGradHook> take_user() { return std::move(user_); }

 private:
  // The unsharded parameter keeps its group alive, not the other way round.
  std::shared_ptr<GroupPort> port_;
  size_t index_;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> user_;
};

/// What a user has installed: of a hook that is another group's, which has given the unsharded parameter up, what it wraps.
std::unique_ptr<torch::autograd::PostAccumulateGradHook> users_part(
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook) {
  auto* ours = dynamic_cast<GradientHook*>(hook.get());
  return ours != nullptr ? ours->take_user() : std::move(hook);
}

}  // namespace

void install_gradient_hook(const at::Tensor& unsharded_param, std::shared_ptr<GroupPort> port, size_t index) {
  namespace autograd_impl = torch::autograd::impl;
  // A parameter that never required a gradient has none yet, and may be unfrozen later.
  autograd_impl::materialize_autograd_meta(unsharded_param);
  auto user = users_part(std::move(autograd_impl::post_acc_grad_hooks(unsharded_param)));
  autograd_impl::set_post_acc_grad_hooks(
      unsharded_param, std::make_unique<GradientHook>(std::move(port), index, std::move(user)));
}

bool has_gradient_hook(const at::Tensor& tensor) {
  namespace autograd_impl = torch::autograd::impl;
  if (autograd_impl::get_autograd_meta(tensor) == nullptr) return false;
  return dynamic_cast<const GradientHook*>(autograd_impl::post_acc_grad_hooks(tensor).get()) != nullptr;
}

}  // namespace fsdp
