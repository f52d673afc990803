#pragma once

#include "group/reduce/reduce_part.hpp"

namespace fsdp {

class ParamGroup;

/// Takes the group's unsharded gradients off the unsharded parameters, with the sums that wait, and sorts them by the dtype that they are
/// summed in. Nothing is packed yet. Throws ArgumentError where ranks could not agree on a dtype.
ReduceInputs collect_gradients(ParamGroup& group);

/// The parts when all trainable parameters have gradients; these stay where they are.
std::vector<ReducePart> expected_parts(ParamGroup& group);

}  // namespace fsdp
