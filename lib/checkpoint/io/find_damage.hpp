#pragma once

#include <string>
#include <vector>

#include "checkpoint/format/catalogue.hpp"

namespace fsdp {

/// What of the files of a checkpoint's manifest is not as it says, block by block; see CheckpointReader::find_damage.
std::vector<std::string> find_damage(const Catalogue& catalogue, bool follow_symlinks);

}  // namespace fsdp
