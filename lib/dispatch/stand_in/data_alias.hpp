#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// `data` is what `tensor.data` gives: another tensor over the same memory, with a version counter of its own. If `tensor`
/// shows a sharded parameter, the owner of that is told of what is written by way of `data`. Any other tensor is left alone.
void watch_writes_to_data(const at::Tensor& tensor, const at::Tensor& data);

}  // namespace fsdp
