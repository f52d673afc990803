#pragma once

#include <vector>

#include "group/reduce/reduce_bucket.hpp"

namespace fsdp {

class ParamGroup;

/// Takes the group's unsharded gradients off the unsharded parameters, with the sums that wait, and sorts them by the dtype
/// that they are summed in, into the buckets that the group has kept. Nothing is packed yet. Throws UsageError where ranks
/// could not agree on a dtype.
ReduceInputs collect_gradients(ParamGroup& group);

/// The buckets when all trainable parameters have gradients; these stay where they are.
std::vector<ReduceBucket> expected_buckets(ParamGroup& group);

/// Lets go of the memory of a reduction's buckets, after their last use, and keeps the rest for the group's next reduction.
void keep_buckets(ParamGroup& group, std::vector<ReduceBucket> buckets);

}  // namespace fsdp
