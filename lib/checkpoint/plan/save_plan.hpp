#pragma once

#include <vector>

#include "checkpoint/plan/pieces.hpp"
#include "checkpoint/plan/rank_group.hpp"
#include "fsdp/checkpoint_parts.hpp"

namespace fsdp {

/// What is written where, and by whom.
struct SavePlan {
  FilePlan files;                                ///< the same on all ranks
  std::vector<const CheckpointTensor*> tensors;  ///< this rank's, in the order of its sections
  std::vector<at::ScalarType> dtypes;            ///< of these, in the file
  std::vector<FilePiece> pieces;                 ///< that this rank writes, in the order of the files
};

/// A collective call of a few numbers per tensor: which ranks hold the same elements, so that they divide the work, and
/// whether all ranks' elements make up each tensor exactly once. Throws UsageError, on all ranks, where they do
/// not, and for tensors of one name that differ.
SavePlan plan_save(const RankGroup& ranks, const CheckpointParts& parts, int64_t max_file_bytes);

/// Throws UsageError, beginning with the tensor's name, unless `local` is what `sizes` and `ranges` say.
void require_consistent(const CheckpointTensor& tensor);
/// What the rank holds: `ranges`, or all of it.
std::vector<ElementRange> held_ranges(const CheckpointTensor& tensor);

}  // namespace fsdp
