#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensor/shard_layout.hpp"

namespace fsdp {

/// One tensor of a flat run.
struct FlatItem {
  int64_t numel = 0;
  /// Elements, counted from the tensor's first in memory, that no two ranks share; 1: any cut will do.
  int64_t block_numel = 1;
};

/// Tensors one after another in one buffer that is cut in W equal pieces: FSDP1's flat parameter,
/// with veScale's blocks. All in elements.
struct FlatRun {
  std::vector<int64_t> starts;  ///< where each tensor begins
  int64_t piece_numel = 0;      ///< of one rank

  /// What `rank` holds of the tensor that starts at `start`, in elements of that tensor.
  RowRange held(int64_t start, int64_t numel, int rank) const;
};

/// The shortest pieces, as far as it is cheap to find them: tensors keep their order and begin at
/// multiples of `alignment`, and so do the pieces; blocks stay whole by gaps before tensors. Without
/// blocks it is the shortest; with blocks the first of 1,000 lengths that works, else a length that
/// all blocks divide.
///
/// Throws UsageError for a block below 1, naming the item's index.
FlatRun plan_flat_run(std::span<const FlatItem> items, int world_size, int64_t alignment);

}  // namespace fsdp
