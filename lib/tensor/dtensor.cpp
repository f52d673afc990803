#include "fsdp/dtensor.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/require.hpp"
#include "tensor/gather_whole.hpp"
#include "tensor/local_piece.hpp"
#include "tensor/strides.hpp"

namespace fsdp {
namespace {

std::string sizes_text(c10::IntArrayRef sizes) { return fmt::format("({})", fmt::join(sizes, ", ")); }

void check_tensor(const at::Tensor& tensor, std::string_view subject) {
  require(tensor.defined(), "{}: expected a tensor, got an undefined one", subject);
  require(tensor.layout() == c10::kStrided, "{}: expected a dense tensor, got a sparse one; "
          "convert it with to_dense()", subject);
}

std::vector<int64_t> inferred_sizes(const at::Tensor& local, const DeviceMesh& mesh,
                                    const std::vector<Placement>& placements) {
  std::vector<int64_t> sizes = local.sizes().vec();
  for (size_t mesh_dim = 0; mesh_dim < placements.size(); ++mesh_dim)
    if (const auto* shard = std::get_if<Shard>(&placements[mesh_dim])) {
      require(!sizes.empty(),
              "from_local: Shard({}) of a 0-dim tensor needs the whole tensor's sizes, got none; pass an "
              "empty list, and size {{0}} tensors on the ranks other than 0",
              shard->dim);
      sizes[shard->dim] *= mesh.shape()[mesh_dim];
    }
  return sizes;
}

/// `tensor` with the given strides: itself if it has them, else a copy.
at::Tensor with_strides(at::Tensor tensor, c10::IntArrayRef strides) {
  if (tensor.numel() < 2 || tensor.strides() == strides) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

}  // namespace

DTensor DTensor::from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            at::OptionalIntArrayRef sizes, at::OptionalIntArrayRef strides) {
  check_tensor(local, "from_local");
  const std::vector<int64_t>& coordinates = mesh.coordinates();
  if (local.device().type() != mesh.device_type() && !local.is_meta()) [[unlikely]]
    throw UsageError(fmt::format(
        "from_local: expected a tensor on {}, the device type of {}, got one on {}; move it or make the "
        "mesh with that device type",
        c10::DeviceTypeName(mesh.device_type(), true), mesh.to_string(), local.device().str()));
  DTensor result;
  const int64_t ndim = sizes ? static_cast<int64_t>(sizes->size()) : local.dim();
  result.placements_ = normalised(std::move(placements), mesh, ndim, "from_local");
  result.sizes_ = sizes ? sizes->vec() : inferred_sizes(local, mesh, result.placements_);
  const LocalPiece piece = local_piece(result.sizes_, mesh.shape(), coordinates, result.placements_);
  if (local.sizes() != c10::IntArrayRef(piece.sizes)) [[unlikely]]
    throw UsageError(fmt::format(
        "from_local: of a tensor of sizes {} with placements {}, the rank at {} of {} holds sizes {}, got "
        "{}; pass the sizes of the whole tensor, or this rank's piece of it",
        sizes_text(result.sizes_), to_string(result.placements_), sizes_text(coordinates),
        mesh.to_string(), sizes_text(piece.sizes), sizes_text(local.sizes())));
  result.strides_ = strides ? strides->vec() : row_major_strides(result.sizes_);
  if (strides && !is_dense(result.sizes_, *strides)) [[unlikely]]
    throw UsageError(fmt::format(
        "from_local: expected strides that lay out sizes {} without gaps or overlaps, got {}; leave them "
        "out for row-major order",
        sizes_text(result.sizes_), sizes_text(*strides)));
  result.mesh_ = std::move(mesh);
  result.local_ = std::move(local);
  return result;
}

int64_t DTensor::numel() const { return c10::multiply_integers(sizes_); }

at::Tensor DTensor::full_tensor() const {
  require(defined(), "full_tensor: expected a DTensor made with from_local or distribute_tensor, got an "
                     "undefined one");
  const at::NoGradGuard no_grad;
  if (local_.is_meta()) return at::empty_strided(sizes_, strides_, local_.options());
  return with_strides(gather_whole(local_.detach(), sizes_, mesh_, placements_), strides_);
}

DTensor distribute_tensor(const at::Tensor& tensor, DeviceMesh mesh, std::vector<Placement> placements,
                          DistributeSource source) {
  check_tensor(tensor, "distribute_tensor");
  placements = normalised(std::move(placements), mesh, tensor.dim(), "distribute_tensor");
  for (const Placement& placement : placements)
    if (std::holds_alternative<Partial>(placement))
      throw UsageError(fmt::format("distribute_tensor: expected Shard or Replicate, got {}; wrap each "
                                   "rank's summand with DTensor::from_local",
                                   to_string(placement)));
  const LocalPiece piece = local_piece(tensor.sizes(), mesh.shape(), mesh.coordinates(), placements);

  at::Tensor local;
  {
    const at::NoGradGuard no_grad;
    at::Tensor whole = tensor.detach();
    if (!whole.is_meta()) whole = whole.to(mesh.device());
    if (source == DistributeSource::kBroadcastFromRank0) whole = broadcast_whole(whole, mesh);
    local = whole;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      local = local.narrow(dim, piece.offsets[dim], piece.sizes[dim]);
    // Only a 0-dim tensor's piece can have other sizes by now: the ranks without it hold {0}.
    local = local.dim() == static_cast<int64_t>(piece.sizes.size()) ? local.clone()
                                                                     : whole.new_empty(piece.sizes);
  }
  local.set_requires_grad(tensor.requires_grad());
  const bool dense = tensor.is_non_overlapping_and_dense();
  return DTensor::from_local(std::move(local), std::move(mesh), std::move(placements), tensor.sizes(),
                             dense ? at::OptionalIntArrayRef(tensor.strides()) : std::nullopt);
}

}  // namespace fsdp
