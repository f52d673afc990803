#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

class ParamGroup;

// What is spread over the ranks as parameter `index` is (its values, its gradient, its optimizer state) on every rank, outside
// autograd, in memory of its own without padding, on the mesh's device; a meta tensor stays one. local: shaped like the sharded
// parameter, on any device. Both are collective calls.

/// Gathers over the data-parallel ranks: sized as the unsharded parameter, which is this rank's part of a tensor-parallel one.
at::Tensor unsharded_values(const ParamGroup& group, size_t index, const at::Tensor& local);
/// Gathers over the ranks of tensor parallelism, too: of `whole_sizes`.
at::Tensor full_values(const ParamGroup& group, size_t index, const at::Tensor& local);

}  // namespace fsdp
