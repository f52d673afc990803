#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tensor/shard_layout.hpp"

// What one rank holds of a tensor, where a ShardLayout says who holds what.
namespace fsdp {

/// `rank`'s piece of a tensor with the layout's sizes, without padding: a view, but for a flat piece of a tensor with other
/// strides than the layout's.
at::Tensor part_of(const ShardLayout& layout, const at::Tensor& whole, int rank);

/// The elements of the whole tensor in row-major order that `rank`'s piece holds; see fsdp::local_ranges.
std::vector<ElementRange> element_ranges(const ShardLayout& layout, int rank);

/// Who holds which elements of a tensor of these sizes, as a number: every rank and machine gets the same.
uint64_t cut_hash(const ShardLayout& layout);

}  // namespace fsdp
