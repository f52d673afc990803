#pragma once

#include "group/reduce/reduce_part.hpp"

namespace fsdp {

class ParamGroup;

/// Sums the part's sum over the replicas: starts an all-reduce, or calls the hook that takes its place. Throws ArgumentError
/// where a hook returns what is no such sum.
void start_all_reduce(ParamGroup& group, ReducePart& part);

}  // namespace fsdp
