#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// Gives `tensor` the storage, sizes, dtype and device of `other`, as set_data does, from and to
/// the meta device too, which set_data refuses. Who holds `tensor` keeps it; its requires_grad,
/// hooks, gradient and version counter stay. A residency key on it is gone.
void replace_tensor(const at::Tensor& tensor, const at::Tensor& other);

}  // namespace fsdp
