#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tensor/dtensor_spec.hpp"

// What autograd records of DTensors: these functions, and nothing else (Note [Sharding propagation]). Each is a collective call
// where it moves anything, and so is its backward.
namespace fsdp {

/// Makes a DTensor around `local`. Its gradient comes back as `local`'s: placed as default_gradient of the spec's placements.
at::Tensor recorded_from_local(const at::Tensor& local, DTensorSpec::Ptr spec);
/// Returns this rank's piece. gradient: how the piece's gradient is placed.
at::Tensor recorded_to_local(const at::Tensor& dtensor, std::vector<Placement> gradient);
/// Redistributes a DTensor. gradient: how the result's gradient is placed.
at::Tensor recorded_redistribution(const at::Tensor& dtensor, Redistribution way, std::vector<Placement> gradient);
/// Returns the whole as an ordinary tensor, whose gradient every rank has.
at::Tensor recorded_whole(const at::Tensor& dtensor, std::string_view operation);

}  // namespace fsdp
