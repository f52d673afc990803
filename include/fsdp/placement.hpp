#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// Tensor dimension `dim` is cut in chunks of ceil(n / W) rows; trailing ranks may be short or empty.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};

/// As Shard, where mesh dimensions further right cut tensor dimension `dim` first: how FSDP, on the left,
/// shards what tensor parallelism has sharded already. `split_factor` is the number of pieces that
/// they make, the product of their sizes. So on a mesh of shape (dp, tp) the placements
/// (StridedShard(0, split_factor=tp), Shard(0)) are the rows cut in tp chunks, each of them in dp; read left
/// to right, the left one takes a stripe of every tp chunk.
///
/// Where no mesh dimensions to the right account for `split_factor` chunks: the dimension is cut in
/// `split_factor` chunks, each of these in one for every rank, and a rank holds its share of them all.
///
/// torch's _StridedShard gives the same pieces wherever all chunks are equal. Where they are not, it cuts a
/// rank's stripes, put together, once more in equal parts, which then are no longer parts of the chunk of the
/// tensor-parallel tensor; here they always are.
struct StridedShard {
  int64_t dim = 0;
  int64_t split_factor = 1;
  bool operator==(const StridedShard&) const = default;
};

/// Every rank of the mesh dimension holds the whole.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// Every rank holds a summand (or what `op` combines). All Partials of one tensor share their `op`: in
/// which order a sum and a maximum were taken would change the result.
struct Partial {
  ReduceOp op = ReduceOp::kSum;
  bool operator==(const Partial&) const = default;
};

/// What one mesh dimension does with a tensor.
using Placement = std::variant<Shard, StridedShard, Replicate, Partial>;

/// How a group's parameters are cut over the ranks that shard them.
enum class ParamLayout {
  /// Every parameter by itself, along one of its dimensions: Shard(0) unless asked otherwise.
  kPerParameter,
  /// One after another in one buffer that is cut in equal pieces, wherever that may be in a parameter:
  /// nothing is padded but the end, and nothing is copied around an all-gather.
  kFlat,
};

/// "Shard(0)", "StridedShard(dim=0, split_factor=2)", "Replicate()", "Partial(sum)".
std::string to_string(const Placement& placement);
std::string to_string(const std::vector<Placement>& placements);

}  // namespace fsdp
