#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// Who takes over `tensor.data = data` where `tensor` is of another kind than the library's own, such as Python's DTensor, or
/// an unsharded parameter for which such a tensor stands. False: it is not one of theirs, and LibTorch is to do it.
using SetDataOfKind = bool (*)(const at::Tensor& tensor, const at::Tensor& data);
/// Once, while the process begins.
void set_data_of_kind_is_done_by(SetDataOfKind function);

}  // namespace fsdp
