#pragma once

#include "group/reduce/reduce_bucket.hpp"

// This rank's rows of what reduce-scatters have summed, and those that wait until the replicas are summed too (HSDP without
// all-reduce).
namespace fsdp {

class ParamGroup;

/// This rank's rows of the bucket's entry `i`, in its sum.
at::Tensor local_piece(const ParamGroup& group, const ReduceBucket& bucket, size_t i);
/// Returns the same rows as a tensor that becomes the parameter's gradient.
at::Tensor gradient_piece(const ParamGroup& group, const ReduceBucket& bucket, size_t i);
/// Adds to the bucket's sum what earlier backwards have left.
void add_partial_sums(ParamGroup& group, ReduceBucket& bucket);
/// Leaves the bucket's sum for a later backward.
void store_partial_sums(ParamGroup& group, ReduceBucket& bucket);

}  // namespace fsdp
