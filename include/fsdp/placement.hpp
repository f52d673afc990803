#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// Tensor dimension `dim`, of size n, is cut into chunks of ceil(n / W) for W ranks; the last ranks may have less, or nothing.
struct FSDP_API Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};

/// As Shard, but mesh dimensions to the right cut tensor dimension `dim` first: FSDP on the left shards what tensor
/// parallelism has sharded already. `split_factor` is the number of chunks that these make, the product of their sizes. On a
/// mesh of shape (dp, tp), the placements (StridedShard(0, split_factor=tp), Shard(0)) cut the rows into tp chunks and each
/// chunk into dp.
///
/// If no mesh dimensions to the right make `split_factor` chunks: the dimension is cut into `split_factor` chunks, each chunk
/// into one part for every rank, and a rank holds its part of each chunk.
///
/// torch's _StridedShard gives the same pieces if all chunks are equal. If not, its pieces may cross the chunks of the
/// tensor-parallel tensor; here they never do.
struct FSDP_API StridedShard {
  int64_t dim = 0;
  int64_t split_factor = 1;
  bool operator==(const StridedShard&) const = default;
};

/// Every rank of the mesh dimension holds the whole tensor.
struct FSDP_API Replicate {
  bool operator==(const Replicate&) const = default;
};

/// Every rank of the mesh dimension holds a part of the result; `op` combines the parts: a sum, a maximum or a minimum. All
/// Partials of one tensor have the same `op`.
struct FSDP_API Partial {
  ReduceOp op = ReduceOp::kSum;
  bool operator==(const Partial&) const = default;
};

/// What one mesh dimension does with a tensor.
using Placement = std::variant<Shard, StridedShard, Replicate, Partial>;

/// How a group's parameters are sharded.
enum class ParamLayout {
  /// Each parameter along one of its dimensions: Shard(0) by default.
  kPerParameter,
  /// All parameters one after another in one buffer, which is cut into equal parts, also within a parameter. Only its end is
  /// padded, and an all-gather copies nothing.
  kFlat,
};

/// "Shard(0)", "StridedShard(dim=0, split_factor=2)", "Replicate()", "Partial(sum)".
FSDP_API std::string to_string(const Placement& placement);
FSDP_API std::string to_string(const std::vector<Placement>& placements);

}  // namespace fsdp
