#include "param/accumulator_hooks.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <iterator>
#include <typeinfo>
#include <utility>

namespace fsdp {

namespace {

using torch::autograd::AccumulateGrad;

bool accumulates_on(const torch::autograd::Node& node, const c10::TensorImpl* tensor) {
  return typeid(node) == typeid(AccumulateGrad) &&
         static_cast<const AccumulateGrad&>(node).variable.unsafeGetTensorImpl() == tensor;
}

}  // namespace

void AccumulatorHooks::defer(const Weak& accumulator) {
  const auto node = accumulator.lock();
  if (!node) return;
  deferred_.push_back({accumulator, std::exchange(node->post_hooks(), {})});
}

void AccumulatorHooks::note(const torch::autograd::AutogradMeta& registered, const c10::TensorImpl* tensor) {
  std::erase_if(own_, [](const Weak& weak) { return weak.expired(); });
  const auto node = registered.grad_accumulator_.lock();
  if (!node || !accumulates_on(*node, tensor)) return;
  const bool is_known = std::ranges::any_of(own_, [&](const Weak& weak) { return weak.lock() == node; });
  if (!is_known) own_.push_back(registered.grad_accumulator_);
}

bool AccumulatorHooks::has_any() const {
  return !deferred_.empty() || std::ranges::any_of(own_, [](const Weak& weak) {
    const auto node = weak.lock();
    return node && (!node->pre_hooks().empty() || !node->post_hooks().empty());
  });
}

at::Tensor AccumulatorHooks::run_before(at::Tensor gradient) const {
  const auto own = own_;  // a hook may ask for more of them
  for (const auto& weak : own) {
    const auto node = weak.lock();
    for (size_t i = 0; node && i < node->pre_hooks().size(); ++i) {
      auto result = (*node->pre_hooks()[i])({gradient});
      if (!result.empty() && result[0].defined()) gradient = result[0];
    }
  }
  return gradient;
}

void AccumulatorHooks::run_behind(const at::Tensor& gradient) {
  const auto own = own_;
  for (const auto& weak : own) {
    const auto node = weak.lock();
    for (size_t i = 0; node && i < node->post_hooks().size(); ++i) (*node->post_hooks()[i])({}, {gradient});
  }
  for (auto& [accumulator, hooks] : std::exchange(deferred_, {})) {
    for (auto& hook : hooks) (*hook)({}, {gradient});
    if (const auto node = accumulator.lock())
      std::move(hooks.begin(), hooks.end(), std::back_inserter(node->post_hooks()));
  }
}

}  // namespace fsdp
