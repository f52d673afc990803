#pragma once

#include <string>
#include <vector>

#include "group/param_group.hpp"

namespace fsdp {

/// Parameters of one class lie side by side in this rank's shard from now on, which the classes alias. labels: by
/// parameter. Handed out already: checks that the labels are the same. Takes the root's lock.
LocalShards& make_local_shards(ParamGroup& group, const std::vector<std::string>& labels);

}  // namespace fsdp
