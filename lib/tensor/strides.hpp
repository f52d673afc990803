#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

/// "(5, 3)".
std::string sizes_text(c10::IntArrayRef sizes);

/// Strides of a row-major tensor. As ATen's: an empty dimension counts as 1, so that none is 0.
std::vector<int64_t> row_major_strides(c10::IntArrayRef sizes);

/// True if the strides lay the sizes out without gaps or overlaps.
bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides);

/// True if both strides lay the sizes out alike. The stride of a dimension of one row is idle: autograd may give a
/// gradient another one than its parameter has.
bool lay_out_alike(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef others);

/// The elements in the order of memory with `strides` (dense), 1-D: a view where the tensor has them,
/// else a copy. Outside autograd.
at::Tensor in_memory_order(const at::Tensor& tensor, c10::IntArrayRef strides);

}  // namespace fsdp
