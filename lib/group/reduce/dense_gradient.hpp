#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// A gradient as bytes can be sent: strided, and what a lazy view (conj, neg) leaves to be done is done.
/// An undefined one stays undefined.
at::Tensor dense_gradient(at::Tensor gradient);

}  // namespace fsdp
