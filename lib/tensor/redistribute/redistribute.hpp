#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// A tensor's way from some placements to others, both normalised.
struct Redistribution {
  DeviceMesh mesh;
  std::vector<int64_t> sizes, strides;  ///< of the whole
  std::vector<Placement> from, to;
  std::string subject;  ///< of its collectives: "full_tensor (5, 2)"
};

/// Returns this rank's new piece, outside autograd; `local` itself if no rank's piece changes. New pieces have their dimensions
/// in memory in the order of the whole's. A collective call.
at::Tensor redistribute_piece(const at::Tensor& local, const Redistribution& way);

/// Redistributes as `redistribute_piece` does, in autograd's record where it is on and `local` requires grad. `gradient`: how
/// the new piece's gradient is placed, cut as `way.to` is; Replicate or Partial sum where that is not. `local`'s is placed as
/// `default_gradient(way.from)`.
at::Tensor redistribute_recorded(const at::Tensor& local, const Redistribution& way, const std::vector<Placement>& gradient);

/// Returns how gradients of a tensor with these placements are taken to be placed: alike, but replicated instead of Partial.
/// What is added up passes the sum's gradient on to every summand.
std::vector<Placement> default_gradient(std::vector<Placement> placements);

/// True if autograd would record what is done to `local` here.
bool is_recorded(const at::Tensor& local);

}  // namespace fsdp
