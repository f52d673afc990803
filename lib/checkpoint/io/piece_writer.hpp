#pragma once

#include <string>
#include <vector>

#include "checkpoint/format/block_sums.hpp"
#include "checkpoint/plan/save_plan.hpp"

namespace fsdp {

/// Writes this rank's pieces into the files, which are there in their full length, and brings them to the disk.
/// Small pieces that follow one another are written as one. Adds them to `sums`, by file.
void write_pieces(const SavePlan& plan, const std::string& folder, std::vector<BlockSums>& sums);

}  // namespace fsdp
