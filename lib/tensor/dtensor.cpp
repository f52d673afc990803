#include "fsdp/dtensor.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/require.hpp"
#include "tensor/broadcast_whole.hpp"
#include "tensor/local_piece.hpp"
#include "tensor/piece.hpp"
#include "tensor/piece_map.hpp"
#include "tensor/redistribute.hpp"
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
    if (const auto dim = sharded_dim(placements[mesh_dim])) {
      require(!sizes.empty(),
              "from_local: {} of a 0-dim tensor needs the whole tensor's sizes, got none; pass an "
              "empty list, and size {{0}} tensors on the ranks other than 0",
              to_string(placements[mesh_dim]));
      sizes[*dim] *= mesh.shape()[mesh_dim];
    }
  return sizes;
}

/// `tensor` with the given strides: itself if it has them, else a copy.
at::Tensor with_strides(at::Tensor tensor, c10::IntArrayRef strides) {
  if (tensor.numel() < 2 || tensor.strides() == strides) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

/// A copy of what `piece` names, in memory as `whole` is.
at::Tensor own_part(const at::Tensor& whole, const LocalPiece& piece) {
  if (whole.dim() == 0) return piece.sizes.empty() ? whole.clone() : whole.new_empty(piece.sizes);
  std::vector<IndexRanges> all;
  for (const int64_t size : whole.sizes()) all.push_back(all_indices(size));
  const at::Tensor part = part_of({.data = whole, .indices = all}, piece.indices).data;
  const std::vector<int64_t> strides = dense_strides(piece.sizes, whole.strides());
  if (!part.is_alias_of(whole) && part.strides() == c10::IntArrayRef(strides)) return part;
  return at::empty_strided(piece.sizes, strides, part.options()).copy_(part);
}

void check_defined(const at::Tensor& local, std::string_view subject) {
  require(local.defined(), "{}: expected a DTensor made with from_local or distribute_tensor, got an "
                           "undefined one", subject);
}

/// How the gradient of what `way` leads to is placed: as asked, or by default.
std::vector<Placement> gradient_placements(std::vector<Placement> asked, const Redistribution& way,
                                           std::string_view subject) {
  if (asked.empty()) return default_gradient(way.to);
  const auto ndim = static_cast<int64_t>(way.sizes.size());
  asked = normalised(std::move(asked), way.mesh, ndim, fmt::format("{}: grad_placements", subject));
  for (size_t m = 0; m < asked.size(); ++m) {
    const bool fits = sharded_dim(way.to[m]) ? asked[m] == way.to[m]
                                             : asked[m] == Placement(Replicate{}) ||
                                                   asked[m] == Placement(Partial{});
    if (!fits) [[unlikely]]
      throw UsageError(fmt::format(
          "{}: expected grad_placements that are the result's where it is sharded, Replicate() or "
          "Partial(sum) elsewhere, got {} for a result placed as {}; every rank's gradient has the "
          "sizes of its piece of the result",
          subject, to_string(asked), to_string(way.to)));
  }
  return asked;
}

/// Partial values that are combined or made have to be ones that can be, and recorded.
void check_partials(const at::Tensor& local, const Redistribution& way, std::string_view subject) {
  for (size_t m = 0; m < way.from.size(); ++m) {
    if (way.from[m] == way.to[m]) continue;
    for (const Placement& placement : {way.from[m], way.to[m]}) {
      const auto* partial = std::get_if<Partial>(&placement);
      if (partial == nullptr || partial->op == ReduceOp::kSum) continue;
      if (local.is_complex()) [[unlikely]]
        throw UsageError(fmt::format("{}: {} needs numbers that have an order, got {}", subject,
                                     to_string(placement), c10::toString(local.scalar_type())));
      if (is_recorded(local)) [[unlikely]]
        throw UsageError(fmt::format("{}: {} has no gradient that a rank could know by itself, and this "
                                     "rank's piece requires grad; detach it first",
                                     subject, to_string(placement)));
    }
  }
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

std::vector<ElementRange> DTensor::element_ranges() const {
  check_defined(local_, "element_ranges");
  return fsdp::element_ranges(sizes_, mesh_.shape(), mesh_.coordinates(), placements_);
}

DTensor DTensor::moved(std::vector<Placement> placements, std::vector<Placement> grad_placements,
                       const char* subject) const {
  check_defined(local_, subject);
  placements = normalised(std::move(placements), mesh_, static_cast<int64_t>(sizes_.size()), subject);
  const Redistribution way = {.mesh = mesh_,
                              .sizes = sizes_,
                              .strides = strides_,
                              .from = placements_,
                              .to = std::move(placements),
                              .subject = fmt::format("{} {}", subject, sizes_text(sizes_))};
  const auto gradient = gradient_placements(std::move(grad_placements), way, subject);
  check_partials(local_, way, subject);

  DTensor result = *this;
  result.placements_ = way.to;
  result.local_ = redistribute_recorded(local_, way, gradient);
  if (result.local_.is_same(local_) && !is_recorded(local_)) result.local_ = local_.detach();
  return result;
}

DTensor DTensor::redistribute(std::vector<Placement> placements,
                              std::vector<Placement> grad_placements) const {
  return moved(std::move(placements), std::move(grad_placements), "redistribute");
}

at::Tensor DTensor::full_tensor(std::vector<Placement> grad_placements) const {
  check_defined(local_, "full_tensor");
  const std::vector<Placement> whole(placements_.size(), Replicate{});
  const at::Tensor full = moved(whole, std::move(grad_placements), "full_tensor").local_;
  // A view, so that what is done to its metadata is not done to the piece.
  return with_strides(full.is_same(local_) ? at::alias(full) : full, strides_);
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
    local = own_part(whole, piece);
  }
  local.set_requires_grad(tensor.requires_grad());
  const bool dense = tensor.is_non_overlapping_and_dense();
  return DTensor::from_local(std::move(local), std::move(mesh), std::move(placements), tensor.sizes(),
                             dense ? at::OptionalIntArrayRef(tensor.strides()) : std::nullopt);
}

}  // namespace fsdp
