#pragma once

#include <torch/nn/module.h>

namespace fsdp {

/// Exactly one of LibTorch's lists and dicts of modules or parameters, which have no forward of their own.
bool is_container(const torch::nn::Module& module);

/// Throws UsageError if the module is a container.
void refuse_container(const torch::nn::Module& module);

}  // namespace fsdp
