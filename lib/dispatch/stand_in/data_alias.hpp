#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// Watches writes by way of `data`: if `tensor` shows a sharded parameter, the owner of that is told of them. `data` is what
/// `tensor.data` gives: another tensor over the same memory, with a version counter of its own. Any other tensor is left alone.
void watch_writes_to_data(const at::Tensor& tensor, const at::Tensor& data);

}  // namespace fsdp
