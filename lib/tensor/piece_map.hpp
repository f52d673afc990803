#pragma once

#include <c10/util/ArrayRef.h>

#include <bitset>
#include <optional>
#include <vector>

#include "fsdp/placement.hpp"
#include "tensor/index_ranges.hpp"

namespace fsdp {

/// Some dimensions of a mesh.
using MeshDims = std::bitset<64>;

/// Knows which indices of each tensor dimension which rank of a mesh holds. A rank's piece is the product of its indices in all
/// dimensions, which keep their order. A 0-dim tensor counts as one of size 1.
///
/// Note [Order of cuts]
/// Placements act left to right, but for a StridedShard: it is cut after the mesh dimensions to its
/// right that shard the same tensor dimension, if the sizes of the first of these to be cut multiply
/// to its split factor. Then what it cuts are the pieces that these made, whatever their sizes, as FSDP
/// cuts a tensor-parallel tensor. Otherwise it keeps its place and cuts every one of `split_factor`
/// chunks. Both say the same where all chunks are equal.
class PieceMap {
 public:
  /// placements: normalised. Throws UsageError for a negative size.
  PieceMap(c10::IntArrayRef sizes, std::vector<int64_t> mesh_shape,
           const std::vector<Placement>& placements);

  /// Returns the number of the tensor's dimensions, 1 for a 0-dim one.
  int64_t ndim() const { return static_cast<int64_t>(sizes_.size()); }
  const std::vector<int64_t>& mesh_shape() const { return mesh_shape_; }
  /// Returns the mesh dimensions that cut tensor dimension `dim`.
  MeshDims cutting(int64_t dim) const;

  /// Returns what the rank at `coordinates` holds of `dim`.
  IndexRanges indices(int64_t dim, const std::vector<int64_t>& coordinates) const;
  /// Returns what the ranks that differ from `coordinates` in mesh dimensions of `over` alone hold together.
  IndexRanges united(int64_t dim, const std::vector<int64_t>& coordinates, MeshDims over) const;

 private:
  struct Cut {
    size_t mesh_dim;
    int64_t stripes;  ///< 1: of what is left as one
  };
  static void insert(std::vector<Cut>& cuts, Cut cut, const std::vector<int64_t>& mesh_shape);

  std::vector<int64_t> sizes_, mesh_shape_;
  std::vector<std::vector<Cut>> cuts_;  ///< of each tensor dimension, first to last
};

/// Calls `visit` with the coordinates of every rank that differs from `coordinates` in `over` alone,
/// in row-major order, until it returns false.
template <class Visit>
void for_each_rank(std::vector<int64_t> coordinates, const std::vector<int64_t>& mesh_shape,
                   MeshDims over, const Visit& visit) {
  for (size_t m = 0; m < mesh_shape.size(); ++m)
    if (over[m]) coordinates[m] = 0;
  for (;;) {
    if (!visit(coordinates)) return;
    size_t m = mesh_shape.size();
    while (m-- > 0) {
      if (!over[m]) continue;
      if (++coordinates[m] < mesh_shape[m]) break;
      coordinates[m] = 0;
    }
    if (m >= mesh_shape.size()) return;
  }
}

/// Returns the tensor dimension that a Shard or StridedShard cuts; none for others.
std::optional<int64_t> sharded_dim(const Placement& placement);
/// Sets the dimension of a placement that cuts one.
void set_sharded_dim(Placement& placement, int64_t dim);

}  // namespace fsdp
