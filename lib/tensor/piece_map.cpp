#include "tensor/piece_map.hpp"

#include "base/require.hpp"

namespace fsdp {

std::optional<int64_t> sharded_dim(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim;
  if (const auto* shard = std::get_if<StridedShard>(&placement)) return shard->dim;
  return std::nullopt;
}

void set_sharded_dim(Placement& placement, int64_t dim) {
  if (auto* shard = std::get_if<Shard>(&placement))
    shard->dim = dim;
  else
    std::get<StridedShard>(placement).dim = dim;
}

PieceMap::PieceMap(c10::IntArrayRef sizes, std::vector<int64_t> mesh_shape,
                   const std::vector<Placement>& placements)
    : sizes_(sizes.vec()), mesh_shape_(std::move(mesh_shape)) {
  for (const int64_t size : sizes_)
    require(size >= 0, "pieces of a tensor: sizes must not be negative, got ({})",
            fmt::join(sizes_, ", "));
  if (sizes_.empty()) sizes_ = {1};
  cuts_.resize(sizes_.size());
  // A mesh dimension of one rank cuts nothing, and must not stand between others.
  for (size_t m = placements.size(); m-- > 0;)
    if (const auto dim = sharded_dim(placements[m]); dim && mesh_shape_[m] > 1) {
      const auto* strided = std::get_if<StridedShard>(&placements[m]);
      insert(cuts_[*dim], {.mesh_dim = m, .stripes = strided ? strided->split_factor : 1},
             mesh_shape_);
    }
}

/// See Note [Order of cuts]. `cuts`: those of the mesh dimensions to the right.
void PieceMap::insert(std::vector<Cut>& cuts, Cut cut, const std::vector<int64_t>& mesh_shape) {
  int64_t pieces = 1;
  auto place = cuts.begin();
  // Behind a cut that kept its stripes nothing is a piece of one chunk any more.
  while (pieces < cut.stripes && place != cuts.end() && place->stripes == 1)
    pieces *= mesh_shape[place++->mesh_dim];
  if (pieces == cut.stripes)
    cuts.insert(place, {.mesh_dim = cut.mesh_dim, .stripes = 1});
  else
    cuts.insert(cuts.begin(), cut);
}

MeshDims PieceMap::cutting(int64_t dim) const {
  MeshDims dims;
  for (const Cut& cut : cuts_[dim]) dims.set(cut.mesh_dim);
  return dims;
}

IndexRanges PieceMap::indices(int64_t dim, const std::vector<int64_t>& coordinates) const {
  IndexRanges left = all_indices(sizes_[dim]);
  for (const Cut& cut : cuts_[dim])
    left = striped_chunk(left, cut.stripes, mesh_shape_[cut.mesh_dim], coordinates[cut.mesh_dim]);
  return left;
}

IndexRanges PieceMap::united(int64_t dim, const std::vector<int64_t>& coordinates,
                             MeshDims over) const {
  const MeshDims all = cutting(dim);
  if ((all & ~over).none()) return all_indices(sizes_[dim]);
  std::vector<IndexRange> together;
  for_each_rank(coordinates, mesh_shape_, over & all, [&](const auto& there) {
    const IndexRanges one = indices(dim, there);
    together.insert(together.end(), one.begin(), one.end());
    return true;
  });
  return joined(std::move(together));
}

}  // namespace fsdp
