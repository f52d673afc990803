#include "tensor/dtensor_spec.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/require.hpp"
#include "tensor/piece.hpp"
#include "tensor/strides.hpp"

namespace fsdp {
namespace {

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

TensorPiece all_of(const at::Tensor& whole) {
  TensorPiece all{.data = whole.dim() == 0 ? whole.reshape({1}) : whole, .indices = {}};
  for (const int64_t size : all.data.sizes()) all.indices.push_back(all_indices(size));
  return all;
}

}  // namespace

DTensorSpec::DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> sizes,
                         std::vector<int64_t> strides, std::string name)
    : mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      name_(std::move(name)),
      numel_(c10::multiply_integers(sizes_)),
      map_(sizes_, mesh_.shape(), placements_),
      piece_(local_piece(sizes_, mesh_.shape(), mesh_.coordinates(), placements_)) {
  for (int64_t dim = 0; dim < map_.ndim(); ++dim) {
    cut_ |= map_.cutting(dim);
    cut_dims_.push_back(map_.cutting(dim).any());
  }
  for (size_t m = 0; m < placements_.size(); ++m)
    has_partial_ |= mesh_.shape()[m] > 1 && std::holds_alternative<Partial>(placements_[m]);
}

DTensorSpec::Ptr DTensorSpec::of_local(const at::Tensor& local, DeviceMesh mesh, std::vector<Placement> placements,
                                       at::OptionalIntArrayRef sizes, at::OptionalIntArrayRef strides,
                                       std::string_view subject) {
  const std::vector<int64_t>& coordinates = mesh.coordinates();
  const int64_t ndim = sizes ? static_cast<int64_t>(sizes->size()) : local.dim();
  placements = normalised(std::move(placements), mesh, ndim, subject);
  const auto whole = sizes ? sizes->vec() : inferred_sizes(local, mesh, placements);
  const LocalPiece piece = local_piece(whole, mesh.shape(), coordinates, placements);
  if (local.sizes() != c10::IntArrayRef(piece.sizes)) [[unlikely]]
    throw UsageError(fmt::format(
        "{}: of a tensor of sizes {} with placements {}, the rank at {} of {} holds sizes {}, got "
        "{}; pass the sizes of the whole tensor, or this rank's piece of it",
        subject, sizes_text(whole), to_string(placements), sizes_text(coordinates), mesh.to_string(),
        sizes_text(piece.sizes), sizes_text(local.sizes())));
  if (strides && !is_dense(whole, *strides)) [[unlikely]]
    throw UsageError(fmt::format(
        "{}: expected strides that lay out sizes {} without gaps or overlaps, got {}; leave them "
        "out for row-major order",
        subject, sizes_text(whole), sizes_text(*strides)));
  return std::make_shared<const DTensorSpec>(std::move(mesh), std::move(placements), whole,
                                             strides ? strides->vec() : row_major_strides(whole));
}

DTensorSpec::Ptr DTensorSpec::of(std::vector<int64_t> sizes, std::vector<Placement> placements,
                                 at::OptionalIntArrayRef strides) const {
  auto rows = strides ? strides->vec() : row_major_strides(sizes);
  return std::make_shared<const DTensorSpec>(mesh_, std::move(placements), std::move(sizes), std::move(rows), name_);
}

bool DTensorSpec::is_placed_as(const DTensorSpec& other) const {
  return this == &other ||
         (sizes_ == other.sizes_ && placements_ == other.placements_ && mesh_ == other.mesh_);
}

Redistribution DTensorSpec::way_to(std::vector<Placement> placements, std::string_view operation) const {
  return {.mesh = mesh_,
          .sizes = sizes_,
          .strides = strides_,
          .from = placements_,
          .to = std::move(placements),
          .subject = name_.empty() ? fmt::format("{} {}", operation, sizes_text(sizes_))
                                   : fmt::format("{} of {}", operation, name_)};
}

at::Tensor DTensorSpec::gather(const at::Tensor& local, std::string_view operation) const {
  const at::NoGradGuard no_grad;
  const auto whole = redistribute_piece(local, way_to(std::vector<Placement>(placements_.size(), Replicate{}), operation));
  return with_strides(whole, strides_);
}

at::Tensor DTensorSpec::part_of(const at::Tensor& whole) const {
  if (is_replicated()) return whole;
  if (has_partial_) {
    const at::NoGradGuard no_grad;
    const DTensorSpec replicated(mesh_, std::vector<Placement>(placements_.size(), Replicate{}), sizes_, strides_);
    return redistribute_piece(whole, replicated.way_to(placements_, "part"));
  }
  if (sizes_.empty()) return piece_.sizes.empty() ? whole : whole.new_empty(piece_.sizes);
  return fsdp::part_of(all_of(whole), piece_.indices).data;
}

at::Tensor DTensorSpec::own_part_of(const at::Tensor& whole) const {
  const auto part = part_of(whole);
  if (sizes_.empty()) return part.is_same(whole) ? whole.clone() : part;
  const std::vector<int64_t> strides = dense_strides(piece_.sizes, whole.strides());
  if (!part.is_alias_of(whole) && part.strides() == c10::IntArrayRef(strides)) return part;
  return at::empty_strided(piece_.sizes, strides, part.options()).copy_(part);
}

}  // namespace fsdp
