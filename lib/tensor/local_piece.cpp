#include "tensor/local_piece.hpp"

#include "base/require.hpp"
#include "tensor/shard_layout.hpp"

namespace fsdp {

std::vector<Placement> normalised(std::vector<Placement> placements, const DeviceMesh& mesh,
                                  int64_t ndim, std::string_view subject) {
  if (static_cast<int>(placements.size()) != mesh.ndim()) [[unlikely]]
    throw UsageError(fmt::format("{}: expected one placement for each dimension of {}, got {}: {}",
                                 subject, mesh.to_string(), placements.size(), to_string(placements)));
  const int64_t dims = std::max<int64_t>(ndim, 1);
  for (Placement& placement : placements)
    if (auto* shard = std::get_if<Shard>(&placement)) {
      if (shard->dim < -dims || shard->dim >= dims) [[unlikely]]
        throw UsageError(fmt::format("{}: {} needs a tensor with that dimension, got one of {} "
                                     "dimension(s); use a dimension in [{}, {})",
                                     subject, to_string(placement), ndim, -dims, dims));
      if (shard->dim < 0) shard->dim += dims;
    }
  return placements;
}

LocalPiece local_piece(c10::IntArrayRef sizes, const std::vector<int64_t>& mesh_shape,
                       const std::vector<int64_t>& coordinates,
                       const std::vector<Placement>& placements) {
  LocalPiece piece{.sizes = sizes.vec(), .offsets = std::vector<int64_t>(sizes.size(), 0)};
  for (size_t mesh_dim = 0; mesh_dim < placements.size(); ++mesh_dim) {
    const auto* shard = std::get_if<Shard>(&placements[mesh_dim]);
    if (!shard) continue;
    const int world_size = static_cast<int>(mesh_shape[mesh_dim]);
    const int rank = static_cast<int>(coordinates[mesh_dim]);
    if (piece.sizes.empty()) {
      piece.sizes = ShardLayout(piece.sizes, world_size).local_sizes(rank);
      continue;
    }
    const RowRange rows = ShardLayout(piece.sizes[shard->dim], world_size).range(rank);
    piece.sizes[shard->dim] = rows.count();
    // A 0-dim tensor has no offset to move; an empty piece of one has a size of its own.
    if (!sizes.empty()) piece.offsets[shard->dim] += rows.begin;
  }
  return piece;
}

}  // namespace fsdp
