#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

namespace fsdp {

/// Lives in the registered parameter's list of gradient hooks, which outlasts any replacement of
/// its storage, and does nothing there but hold the handle.
struct HandleKeeper final : torch::autograd::FunctionPreHook {
  explicit HandleKeeper(at::Tensor handle) : handle(std::move(handle)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return grads;
  }
  at::Tensor handle;
};

}  // namespace fsdp
