#pragma once

#include <ATen/core/Tensor.h>

// Whole gradients that no reduction has taken: on the handles, and sums of backwards without synchronisation.
namespace fsdp {

class ParamGroup;

/// The whole gradient since the last reduction, taken off the handle; undefined if there is none.
at::Tensor take_gradient(ParamGroup& group, size_t index);

/// What `take_gradient` allocates: before the CPU's kernel adds a gradient to a sum of another dtype, it
/// casts all of it.
int64_t bytes_to_take(ParamGroup& group, size_t index);

/// True if a handle of the group holds a gradient that no reduction has taken, or a partial sum waits.
bool has_unreduced_gradients(ParamGroup& group);

/// After a backward without reduction: adds the handles' gradients up in the reduce dtype, if that is
/// another one than theirs. Else they stay where autograd adds to them.
void accumulate_in_reduce_dtype(ParamGroup& group);

/// Drops unsharded gradients and partial sums.
void drop_unreduced_gradients(ParamGroup& group);

}  // namespace fsdp
