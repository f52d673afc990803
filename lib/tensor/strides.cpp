#include "tensor/strides.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace fsdp {

std::string sizes_text(c10::IntArrayRef sizes) { return fmt::format("({})", fmt::join(sizes, ", ")); }

std::vector<int64_t> row_major_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;)
    strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  return strides;
}

bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  if (strides.size() != sizes.size()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size); the stride of a single row is idle
  bool is_empty = false;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (strides[dim] < 0) return false;
    is_empty |= sizes[dim] == 0;
    if (sizes[dim] > 1) dims.emplace_back(strides[dim], sizes[dim]);
  }
  if (is_empty) return true;
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool lay_out_alike(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef others) {
  if (strides == others) return true;
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    if (sizes[dim] != 1 && strides[dim] != others[dim]) return false;
  return true;
}

at::Tensor in_memory_order(const at::Tensor& tensor, c10::IntArrayRef strides) {
  auto ordered = tensor;
  if (!lay_out_alike(tensor.sizes(), tensor.strides(), strides))
    ordered = at::empty_strided(tensor.sizes(), strides, tensor.options().requires_grad(false)).copy_(tensor);
  return ordered.as_strided({tensor.numel()}, {1});
}

}  // namespace fsdp
