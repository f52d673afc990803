#pragma once

#include <torch/nn/module.h>

namespace fsdp {

/// Throws UsageError if the module is a list or dict of others, without a forward of its own.
void refuse_container(const torch::nn::Module& module);

}  // namespace fsdp
