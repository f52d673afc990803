#pragma once

#include "checkpoint/plan/rank_group.hpp"
#include "fsdp/checkpoint.hpp"

namespace fsdp {

/// What save_checkpoint writes; the tensors share the module's and the optimizer's memory. No communication.
CheckpointParts training_parts(const Checkpoint& checkpoint, const RankGroup& ranks, const SaveCheckpointOptions& options);

}  // namespace fsdp
