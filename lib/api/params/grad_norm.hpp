#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/parameters.hpp"

namespace fsdp {

/// `clip_grad_norm_async_`. Its host waits for the device with `error_if_nonfinite`, and if gradients are on another device than
/// the mesh.
at::Tensor clip_grad_norm_on_device(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                                    bool error_if_nonfinite);

}  // namespace fsdp
