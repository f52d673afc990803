#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tensor/dtensor_spec.hpp"

namespace fsdp {

/// Joins everybody's pieces to one tensor with this spec's strides on every rank, outside autograd, on local's device, for flat
/// layouts too: may be `local` itself, and may be followed by padding in memory. A collective call, unless replicated.
at::Tensor full_of(const DTensorSpec& spec, const at::Tensor& local, std::string_view operation);

}  // namespace fsdp
