#include "tensor/dtensor_spec.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/require.hpp"
#include "tensor/piece.hpp"
#include "tensor/shard_part.hpp"
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

/// Nearly all tensors have no name.
std::string memory_error_of(const std::string& name) {
  static const std::string unnamed =
      "this tensor is sharded over ranks and has no memory of its own: read this rank's part with fsdp::to_local(tensor), the "
      "whole with fsdp::full_tensor(tensor)";
  constexpr std::string_view kThis = "this tensor";
  return name.empty() ? unnamed : name + unnamed.substr(kThis.size());
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
      memory_error_(memory_error_of(name_)),
      numel_(c10::multiply_integers(sizes_)),
      map_(sizes_, mesh_.shape(), placements_),
      piece_(local_piece(sizes_, mesh_.shape(), mesh_.get_coordinate(), placements_)) {
  for (int64_t dim = 0; dim < map_.ndim(); ++dim) cut_dims_.push_back(map_.cutting(dim).any());
  for (size_t m = 0; m < placements_.size(); ++m)
    has_partial_ |= mesh_.shape()[m] > 1 && std::holds_alternative<Partial>(placements_[m]);
}

DTensorSpec::DTensorSpec(DeviceMesh mesh, ShardLayout layout, std::shared_ptr<Communicator> group, std::string name)
    : DTensorSpec(mesh, std::vector<Placement>(static_cast<size_t>(mesh.ndim()), Replicate{}), layout.sizes(), layout.strides(),
                  std::move(name)) {
  piece_ = {.sizes = {layout.local_numel(group->rank())}, .indices = {}};
  flat_ = Flat{std::move(layout), std::move(group)};
}

void DTensorSpec::rename(std::string name) const {
  name_ = std::move(name);
  memory_error_ = memory_error_of(name_);
}

std::vector<std::shared_ptr<Communicator>> DTensorSpec::groups_cutting(c10::IntArrayRef dims) const {
  std::vector<std::shared_ptr<Communicator>> groups;
  if (flat_) {
    if (flat_->group->size() > 1) groups.push_back(flat_->group);
    return groups;
  }
  MeshDims cutting;
  for (const auto dim : dims) cutting |= map_.cutting(dim);
  for (size_t m = mesh_.shape().size(); m-- > 0;)
    if (cutting[m]) groups.push_back(mesh_.get_group(static_cast<int>(m)));
  return groups;
}

DTensorSpec::Ptr spec_of_local(const at::Tensor& local, DeviceMesh mesh, std::vector<Placement> placements,
                               at::OptionalIntArrayRef sizes, at::OptionalIntArrayRef strides, std::string_view subject) {
  const std::vector<int64_t>& coordinates = mesh.get_coordinate();
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

DTensorSpec::Ptr spec_like(const DTensorSpec& like, std::vector<int64_t> sizes, std::vector<Placement> placements,
                           at::OptionalIntArrayRef strides) {
  auto rows = strides ? strides->vec() : row_major_strides(sizes);
  return std::make_shared<const DTensorSpec>(like.mesh(), std::move(placements), std::move(sizes), std::move(rows),
                                             like.name());
}

bool DTensorSpec::is_equal(const DTensorSpec& other) const {
  return sizes_ == other.sizes_ && placements_ == other.placements_ && flat_ == other.flat_ && mesh_ == other.mesh_;
}

std::vector<Placement> replicated_everywhere(const DTensorSpec& spec) {
  return std::vector<Placement>(spec.placements().size(), Replicate{});
}

Redistribution way_to(const DTensorSpec& spec, std::vector<Placement> placements, std::string_view operation) {
  return {.mesh = spec.mesh(),
          .sizes = spec.sizes(),
          .strides = spec.strides(),
          .from = spec.placements(),
          .to = std::move(placements),
          .subject = spec.name().empty() ? fmt::format("{} {}", operation, sizes_text(spec.sizes()))
                                         : fmt::format("{} of {}", operation, spec.name())};
}

at::Tensor part_of(const DTensorSpec& spec, const at::Tensor& whole) {
  if (spec.is_flat()) return part_of(spec.flat()->layout, whole, spec.flat()->group->rank());
  if (spec.is_replicated()) return whole;
  if (spec.has_partial()) {
    const at::NoGradGuard no_grad;
    const DTensorSpec replicated(spec.mesh(), replicated_everywhere(spec), spec.sizes(), spec.strides());
    return redistribute_piece(whole, way_to(replicated, spec.placements(), "part"));
  }
  if (spec.sizes().empty()) return spec.piece().sizes.empty() ? whole : whole.new_empty(spec.piece().sizes);
  return cut(all_of(whole), spec.piece().indices).data;
}

at::Tensor copy_part_of(const DTensorSpec& spec, const at::Tensor& whole) {
  const auto part = part_of(spec, whole);
  if (spec.is_flat()) return part.clone();
  if (spec.sizes().empty()) return part.is_same(whole) ? whole.clone() : part;
  const auto& sizes = spec.piece().sizes;
  const std::vector<int64_t> strides = dense_strides(sizes, whole.strides());
  if (!part.is_alias_of(whole) && part.strides() == c10::IntArrayRef(strides)) return part;
  return at::empty_strided(sizes, strides, part.options()).copy_(part);
}

}  // namespace fsdp
