#pragma once

#include "group/reduce/reduce_bucket.hpp"

namespace fsdp {

class ParamGroup;

/// Sums the bucket's sum over the replicas: starts an all-reduce, or calls the hook that takes its place. Throws UsageError
/// where a hook returns what is no such sum.
void start_all_reduce(ParamGroup& group, ReduceBucket& bucket);

}  // namespace fsdp
