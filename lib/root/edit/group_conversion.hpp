#pragma once

#include "group/group_spec.hpp"

namespace fsdp {

class ParamGroup;

/// Other dtypes, another device: unsharded parameters, shards and gradients, with what waits for a reduction; who holds one of
/// the tensors keeps it. From the meta device: shards of zeros. No communication. If memory runs out, nothing has
/// changed. Takes the root's lock. Throws StateError inside a step or a scope.
void convert(ParamGroup& group, const GroupConversion& to);

/// Throws what `convert` would throw.
void check_convertible(const ParamGroup& group, const GroupConversion& to = {});

/// full_precision_in_eval: unsharded parameters are in the parameters' own dtype, or in the policy's. Releases them if that is
/// another one. Nothing else changes; no communication. Unsharded parameters stay the same tensors; only between steps do they
/// change, so that what autograd saved in a step is of the step's dtype.
void compute_in_own_dtype(ParamGroup& group, bool value);

}  // namespace fsdp
