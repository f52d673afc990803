#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace fsdp {

inline int64_t total_bytes(std::span<const at::Tensor> tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace fsdp
