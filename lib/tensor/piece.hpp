#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tensor/index_ranges.hpp"

namespace fsdp {

/// Elements of a whole tensor: the product of some indices of each of its dimensions.
struct TensorPiece {
  at::Tensor data;                   ///< one dimension at least; sizes are the counts of `indices`
  std::vector<IndexRanges> indices;  ///< one for each dimension
};

std::vector<int64_t> sizes_of(const std::vector<IndexRanges>& indices);

/// Makes a piece in new memory, not initialised, row-major.
TensorPiece empty_piece(std::vector<IndexRanges> indices, const at::TensorOptions& options);

/// Copies the elements that both have.
void copy_common(const TensorPiece& to, const TensorPiece& from);

/// Returns those elements of `piece` that `indices` name: a view where they are one box of it, else a copy. indices: all of
/// them held by `piece`.
TensorPiece cut(const TensorPiece& piece, const std::vector<IndexRanges>& indices);

/// Returns strides for `sizes` without gaps, with the dimensions in the order that `strides` has.
std::vector<int64_t> dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides);

}  // namespace fsdp
