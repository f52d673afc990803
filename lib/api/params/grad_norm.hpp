#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/parameters.hpp"

namespace fsdp {

/// `clip_grad_norm_` that leaves the norm on the device, in double and without dimensions: the host does not wait for the
/// device, but for kThrow and where gradients are on another device than the mesh.
at::Tensor clip_grad_norm_on_device(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                                    NonFinite nonfinite);

}  // namespace fsdp
