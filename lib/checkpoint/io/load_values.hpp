#pragma once

#include <vector>

#include "checkpoint/plan/load_plan.hpp"
#include "checkpoint/plan/rank_group.hpp"

namespace fsdp {

/// Reads the matches' values into their tensors. matches: in the order of the files. A collective call: an error
/// of one rank is thrown by all.
void load_values(const RankGroup& ranks, const Catalogue& catalogue, const std::vector<Match>& matches,
                 const LoadCheckpointOptions& options);

}  // namespace fsdp
