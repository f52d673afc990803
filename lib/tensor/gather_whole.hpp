#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// The whole tensor of `sizes` out of all ranks' pieces, on every rank; `local` itself where it is the
/// whole already. Partial pieces are reduced first, while they are small; then the Shards are undone
/// right to left, one all-gather for each mesh dimension of more than one rank.
///
/// local: this rank's piece, outside autograd. placements: normalised. A collective call.
at::Tensor gather_whole(at::Tensor local, c10::IntArrayRef sizes, const DeviceMesh& mesh,
                        const std::vector<Placement>& placements);

/// A contiguous copy of what the rank at coordinates (0, 0, ...) holds. A collective call.
at::Tensor broadcast_whole(const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace fsdp
