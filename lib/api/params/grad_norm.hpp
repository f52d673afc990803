#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/parameters.hpp"

namespace fsdp {

/// What the norm of type 0 counts: gradients with an element that is not zero, as torch.nn.utils does in Python; or all that
/// there are, as torch::nn::utils does.
enum class ZeroNorm { kNotZero, kDefined };

/// `clip_grad_norm_async_`. Its host waits for the device with `error_if_nonfinite`, and if gradients are on another device
/// than the mesh.
at::Tensor clip_grad_norm_on_device(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                                    bool error_if_nonfinite, ZeroNorm zero);

}  // namespace fsdp
