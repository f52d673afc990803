#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

c10d::ReduceOp c10d_op(ReduceOp op);

/// What is gathered or broadcast, as bytes if it is of a dtype that a backend may have no name for: bytes need no
/// arithmetic.
at::Tensor as_sent(const at::Tensor& tensor);
std::vector<at::Tensor> as_sent(std::span<const at::Tensor> tensors);

}  // namespace fsdp
