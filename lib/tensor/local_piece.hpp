#pragma once

#include <c10/util/ArrayRef.h>

#include <string_view>
#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// Where one rank's piece lies in the whole tensor: elements [offsets, offsets + sizes).
struct LocalPiece {
  std::vector<int64_t> sizes;
  /// One per dimension of the whole; an empty piece starts where the tensor ends.
  std::vector<int64_t> offsets;
};

/// `placements` with negative dimensions counted from the end of a tensor of `ndim` dimensions.
/// Shard(0) of a 0-dim tensor is legal and gives it to the mesh dimension's rank 0, see ShardLayout.
/// Throws UsageError, beginning with `subject`, unless there is one placement per mesh dimension and
/// every Shard's dimension exists.
std::vector<Placement> normalised(std::vector<Placement> placements, const DeviceMesh& mesh,
                                  int64_t ndim, std::string_view subject);

/// The piece of the rank at `coordinates`. Placements act left to right: the second Shard of a
/// dimension cuts what the first one left. placements: normalised.
LocalPiece local_piece(c10::IntArrayRef sizes, const std::vector<int64_t>& mesh_shape,
                       const std::vector<int64_t>& coordinates,
                       const std::vector<Placement>& placements);

}  // namespace fsdp
