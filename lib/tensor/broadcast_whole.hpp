#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "fsdp/device_mesh.hpp"

// What the first rank of a mesh, at coordinates (0, 0, ...), gives to the others.
namespace fsdp {

/// True for an undefined mesh: every rank stands alone.
bool is_first_rank(const DeviceMesh& mesh);

/// Everybody gets the first rank's values. tensor: contiguous, on the mesh's device. A collective call.
void broadcast_from_first(const at::Tensor& tensor, const DeviceMesh& mesh, const std::string& subject);

/// A contiguous copy of what the first rank holds. A collective call.
at::Tensor broadcast_whole(const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace fsdp
