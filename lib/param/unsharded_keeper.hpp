#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

namespace fsdp {

/// Lives in the sharded parameter's list of gradient hooks, which outlasts any replacement of
/// its storage, and does nothing there but hold the unsharded parameter.
struct UnshardedKeeper final : torch::autograd::FunctionPreHook {
  explicit UnshardedKeeper(at::Tensor unsharded_param) : unsharded_param(std::move(unsharded_param)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return grads;
  }
  at::Tensor unsharded_param;
};

}  // namespace fsdp
