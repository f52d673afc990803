#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::test {

/// The same memory as a CPU tensor, which keeps nothing alive: for what runs on a stream.
at::Tensor host_view(const at::Tensor& on_late);

/// Other sizes, contiguous, in more memory where there is too little: what was in it is not kept.
void resize_late(const at::Tensor& on_late, at::IntArrayRef sizes);

}  // namespace fsdp::test
