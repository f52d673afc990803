#pragma once

#include <ATen/core/Tensor.h>

#include "api/find_param.hpp"

// From parts to wholes and back, for whatever is spread over the ranks as a parameter is: its values,
// its gradient, its optimizer state. Knows a layout by `element_ranges` alone.
namespace fsdp {

/// The whole tensor, in memory of its own on the mesh's device, with the parameter's sizes and
/// strides and local's dtype. local: shaped like the registered parameter.
/// A collective call over the shard group: one all-gather of the largest part's size.
at::Tensor gather_values(const FoundParam& found, const at::Tensor& local);

/// The elements of `whole` that this rank owns, shaped like the registered parameter, outside
/// autograd. May share memory with `whole`, on whose device it is.
at::Tensor own_values(const FoundParam& found, const at::Tensor& whole);

}  // namespace fsdp
