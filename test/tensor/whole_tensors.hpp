#pragma once

#include <torch/torch.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/fsdp.hpp>
#include <string>
#include <vector>

#include "support/draw.hpp"

namespace fsdp::test {

inline const std::vector<c10::ScalarType> kDtypes = {
    torch::kFloat, torch::kDouble,   torch::kHalf,         torch::kBFloat16, torch::kLong,      torch::kInt,
    torch::kByte,  torch::kBool,     torch::kComplexFloat, torch::kShort,    c10::kFloat8_e4m3fn};

/// 0, 1, 2, ... in row-major order; small enough for every dtype but bool, which alternates.
inline at::Tensor counting(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  const at::Tensor numbers = torch::arange(c10::multiply_integers(sizes)) % (dtype == torch::kBool ? 2 : 100);
  return numbers.to(torch::kFloat).to(dtype).reshape(sizes);
}

/// Equal in dtype, sizes and every byte; at::equal does not know every dtype.
inline bool is_same(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.numel() == 0) return true;
  return at::equal(a.contiguous().reshape({-1}).view(torch::kByte), b.contiguous().reshape({-1}).view(torch::kByte));
}

inline std::string describe(const at::Tensor& tensor, const std::vector<Placement>& placements) {
  return fmt::format("{} {} with {}", c10::toString(tensor.scalar_type()), tensor.sizes().vec(),
                     to_string(placements));
}

/// A mesh with the names "a", "b", "c"...
inline DeviceMesh mesh_of(const std::shared_ptr<Communicator>& world, const std::vector<int64_t>& shape) {
  std::vector<std::string> names;
  for (size_t m = 0; m < shape.size(); ++m) names.push_back(std::string(1, static_cast<char>('a' + m)));
  return init_device_mesh(world, shape, names);
}

/// Placements that cut or copy: StridedShards with any split factor, half of them one that the Shards to the
/// right account for.
inline std::vector<Placement> draw_cuts(Draw& draw, int64_t ndim, const std::vector<int64_t>& mesh_shape) {
  const int64_t dims = std::max<int64_t>(ndim, 1);
  std::vector<Placement> placements(mesh_shape.size());
  std::vector<int64_t> pieces(dims, 1);
  for (size_t m = mesh_shape.size(); m-- > 0;) {
    const int64_t dim = draw.between(0, dims - 1);
    const int64_t kind = draw.between(0, 5);
    if (kind == 0) {
      placements[m] = Replicate{};
      continue;
    }
    const int64_t factor = draw.between(0, 1) == 0 ? pieces[dim] : draw.between(1, 5);
    placements[m] = kind < 4 ? Placement(Shard{dim}) : Placement(StridedShard{dim, factor});
    pieces[dim] *= mesh_shape[m];
  }
  return placements;
}

/// The same, and Partials of `op` among them.
inline std::vector<Placement> draw_placements(Draw& draw, int64_t ndim, const std::vector<int64_t>& mesh_shape,
                                              ReduceOp op) {
  std::vector<Placement> placements = draw_cuts(draw, ndim, mesh_shape);
  for (Placement& placement : placements)
    if (draw.between(0, 3) == 0) placement = Partial{op};
  return placements;
}

/// Placements of what a Partial is the summand of.
inline std::vector<Placement> without_partial(std::vector<Placement> placements) {
  for (Placement& placement : placements)
    if (std::holds_alternative<Partial>(placement)) placement = Replicate{};
  return placements;
}

/// Meshes of at most 8 ranks.
inline const std::vector<std::vector<int64_t>> kMeshShapes = {
    {1},    {2},    {3},    {4},    {5},    {8},    {1, 4}, {4, 1},    {2, 2},
    {2, 3}, {3, 2}, {2, 4}, {4, 2}, {1, 1}, {2, 1}, {3, 1}, {2, 2, 2}, {2, 1, 3}};

}  // namespace fsdp::test
