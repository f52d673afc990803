#pragma once

#include <vector>

#include "fsdp/fully_shard_options.hpp"
#include "module/managed_states.hpp"
#include "module/param_targets.hpp"

namespace fsdp {

/// Two parameters that show the same memory, or a parameter and a buffer, are one value to the plain program; sharded, each
/// has memory of its own, and they part. Throws UsageError, naming both. One rank's parameters keep the memory that they have:
/// they may. Of Python's modules it only warns: there a tie is one parameter in both places.
/// places: of the states' parameters.
void refuse_shared_memory(const ManagedStates& states, const std::vector<ParamTarget>& places,
                          const FullyShardOptions& options);

}  // namespace fsdp
