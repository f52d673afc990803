#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/device_mesh.hpp"

namespace fsdp {

/// A contiguous copy of what the rank at coordinates (0, 0, ...) holds. A collective call.
at::Tensor broadcast_whole(const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace fsdp
