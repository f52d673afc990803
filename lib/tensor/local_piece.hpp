#pragma once

#include <c10/util/ArrayRef.h>

#include <string_view>
#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/local_ranges.hpp"
#include "fsdp/placement.hpp"
#include "tensor/index_ranges.hpp"

namespace fsdp {

/// One rank's piece of a whole tensor. Element (i, j, ...) of the piece is the element of the whole whose
/// index in each dimension is the i-th, j-th, ... of `indices`.
struct LocalPiece {
  /// Sizes of the piece; for a 0-dim tensor: {} where it is held, {0} elsewhere.
  std::vector<int64_t> sizes;
  /// One for each dimension of the whole; a single range unless a StridedShard cuts it.
  std::vector<IndexRanges> indices;
};

/// Returns `placements` with negative dimensions counted from the end of a tensor of `ndim` dimensions. Shard(0) of a 0-dim
/// tensor is legal and gives it to the mesh dimension's rank 0, see ShardLayout. Throws UsageError, beginning with `subject`,
/// unless there is one placement per mesh dimension, every Shard's dimension exists, split factors are 1 at least, and Partials
/// have one op.
std::vector<Placement> normalised(std::vector<Placement> placements, const DeviceMesh& mesh,
                                  int64_t ndim, std::string_view subject);

/// Returns the piece of the rank at `coordinates`. Placements act left to right, see Note [Order of cuts]. placements:
/// normalised.
LocalPiece local_piece(c10::IntArrayRef sizes, const std::vector<int64_t>& mesh_shape,
                       const std::vector<int64_t>& coordinates,
                       const std::vector<Placement>& placements);

/// Returns that piece as elements of the whole tensor in row-major order, in the order of the piece read row-major; see
/// fsdp::local_ranges. A Partial piece is all elements that it has a summand of. Costs one range for each run of elements: cut
/// along another dimension than the first, many.
std::vector<ElementRange> element_ranges(c10::IntArrayRef sizes,
                                         const std::vector<int64_t>& mesh_shape,
                                         const std::vector<int64_t>& coordinates,
                                         const std::vector<Placement>& placements);

}  // namespace fsdp
