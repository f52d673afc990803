#pragma once

#include <ATen/core/Tensor.h>

#include "api/params/find_param.hpp"
#include "group/gather/gather_values.hpp"

// From parts to wholes and back, for whatever is spread over the ranks as a parameter is: its values,
// its gradient, its optimizer state.
namespace fsdp {

/// As gather_values, but of the whole tensor, over the ranks of tensor parallelism too: `whole_sizes`.
at::Tensor gather_whole(const FoundParam& found, const at::Tensor& local);

/// The elements of `whole`, sized as the unsharded parameter, that this rank owns, shaped like the sharded parameter,
/// outside autograd. May share memory with `whole`, on whose device it is.
at::Tensor own_rows(const FoundParam& found, const at::Tensor& whole);
/// The same of a tensor of `whole_sizes`.
at::Tensor own_of_whole(const FoundParam& found, const at::Tensor& whole);

}  // namespace fsdp
