#include "tensor/tensor_part.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "base/require.hpp"
#include "tensor/dtensor_spec.hpp"
#include "tensor/index_ranges.hpp"
#include "tensor/local_piece.hpp"
#include "tensor/piece.hpp"
#include "tensor/piece_map.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

namespace {

std::vector<int64_t> sizes_over_mesh(const at::Tensor& local, const DeviceMesh& mesh,
                                    const std::vector<Placement>& placements) {
  auto sizes = local.sizes().vec();
  for (size_t m = 0; m < placements.size(); ++m)
    if (const auto dim = sharded_dim(placements[m])) sizes[static_cast<size_t>(*dim)] *= mesh.shape()[m];
  return sizes;
}

}  // namespace

bool TensorPart::is_whole() const {
  for (size_t m = 0; m < placements.size(); ++m)
    if (sharded_dim(placements[m]) && mesh.shape()[m] > 1) return false;
  return true;
}

std::vector<Placement> TensorPart::with(std::vector<Placement> data_parallel) const {
  for (auto& placement : data_parallel) {
    const auto* shard = std::get_if<Shard>(&placement);
    if (shard == nullptr) continue;
    const int64_t dim = shard->dim;
    int64_t pieces = 1;
    for (size_t m = 0; m < placements.size(); ++m)
      if (sharded_dim(placements[m]) == dim) pieces *= mesh.shape()[m];
    if (pieces > 1) placement = StridedShard{dim, pieces};
  }
  data_parallel.insert(data_parallel.end(), placements.begin(), placements.end());
  return data_parallel;
}

std::vector<ElementRange> TensorPart::in_whole(const std::vector<ElementRange>& local) const {
  if (is_whole()) return local;
  const auto held = element_ranges(sizes, mesh.shape(), mesh.get_coordinate(), placements);
  std::vector<ElementRange> found;
  for (const auto& range : local)
    for (const auto& part : at_positions(held, range.begin, range.end)) append(found, part);
  return found;
}

DTensorSpec TensorPart::spec(std::string name) const { return {mesh, placements, sizes, strides, std::move(name)}; }

at::Tensor TensorPart::part_of(const at::Tensor& whole) const {
  if (is_whole()) return whole;
  TensorPiece all{.data = whole, .indices = {}};
  for (const int64_t size : whole.sizes()) all.indices.push_back(all_indices(size));
  return fsdp::cut(all, local_piece(sizes, mesh.shape(), mesh.get_coordinate(), placements).indices).data;
}

TensorPart make_tensor_part(const at::Tensor& local, DeviceMesh mesh, DeviceMesh whole_mesh,
                            std::vector<Placement> placements, std::vector<int64_t> sizes,
                            std::string_view name) {
  const auto subject = fmt::format("{}: tensor_parallel_fn", name);
  for (const auto& placement : placements) {
    const bool is_replicated = std::holds_alternative<Replicate>(placement);
    const bool fits = is_replicated || std::holds_alternative<Shard>(placement);
    if (!fits || (!is_replicated && local.dim() == 0)) [[unlikely]]
      throw UsageError(fmt::format("{} gave {} for a tensor of {} dimension(s); expected Shard, of a dimension "
                                   "that there is, or Replicate",
                                   subject, to_string(placement), local.dim()));
  }
  TensorPart part{.mesh = std::move(mesh), .whole_mesh = std::move(whole_mesh), .placements = {}, .sizes = {},
                  .strides = {}};
  part.placements = normalised(std::move(placements), part.mesh, local.dim(), subject);
  part.sizes = sizes.empty() ? sizes_over_mesh(local, part.mesh, part.placements) : std::move(sizes);
  require(static_cast<int64_t>(part.sizes.size()) == local.dim(),
          "{} gave sizes ({}) of the whole for a local tensor of sizes ({}); expected as many dimensions", subject,
          fmt::join(part.sizes, ", "), fmt::join(local.sizes(), ", "));
  const auto piece = local_piece(part.sizes, part.mesh.shape(), part.mesh.get_coordinate(), part.placements);
  require(local.sizes() == c10::IntArrayRef(piece.sizes),
          "{} gave sizes ({}) of the whole, placed as {} on {}: this rank ({}) then holds ({}), but the module "
          "holds a tensor of sizes ({}); chunks have ceil(n / ranks) rows",
          subject, fmt::join(part.sizes, ", "), to_string(part.placements), part.mesh.to_string(),
          fmt::join(part.mesh.get_coordinate(), ", "), fmt::join(piece.sizes, ", "), fmt::join(local.sizes(), ", "));
  part.strides = local.is_non_overlapping_and_dense() ? dense_strides(part.sizes, local.strides())
                                                      : row_major_strides(part.sizes);
  return part;
}

std::vector<std::shared_ptr<Communicator>> cut_over(const TensorPart& part) {
  std::vector<std::shared_ptr<Communicator>> groups;
  for (size_t m = 0; m < part.placements.size(); ++m)
    if (sharded_dim(part.placements[m]) && part.mesh.shape()[m] > 1)
      groups.push_back(part.mesh.get_group(static_cast<int>(m)));
  return groups;
}

std::vector<std::shared_ptr<Communicator>> groups_of(const DeviceMesh& mesh) {
  std::vector<std::shared_ptr<Communicator>> groups;
  for (int m = 0; m < mesh.ndim(); ++m)
    if (mesh.size(m) > 1) groups.push_back(mesh.get_group(m));
  return groups;
}

}  // namespace fsdp
