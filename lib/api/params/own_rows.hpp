#pragma once

#include <ATen/core/Tensor.h>

#include "api/params/find_param.hpp"

// From wholes to parts, for whatever is spread over the ranks as a parameter is: its values, its gradient, its optimizer state.
// group/unsharded_values.hpp has the way back.
namespace fsdp {

/// The elements of `whole`, sized as the unsharded parameter, that this rank owns, shaped like the sharded parameter,
/// outside autograd. May share memory with `whole`, on whose device it is.
at::Tensor own_rows(const FoundParam& found, const at::Tensor& whole);
/// Returns the same of a tensor of `whole_sizes`, which is full: where the parameter is a tensor-parallel part of it, that part
/// is cut out first.
at::Tensor own_of_whole(const FoundParam& found, const at::Tensor& whole);

}  // namespace fsdp
