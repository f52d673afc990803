#pragma once

#include <ATen/core/Tensor.h>

#include "api/find_param.hpp"
#include "group/gather_values.hpp"

// From parts to wholes and back, for whatever is spread over the ranks as a parameter is: its values,
// its gradient, its optimizer state.
namespace fsdp {

/// The elements of `whole` that this rank owns, shaped like the registered parameter, outside
/// autograd. May share memory with `whole`, on whose device it is.
at::Tensor own_values(const FoundParam& found, const at::Tensor& whole);

}  // namespace fsdp
