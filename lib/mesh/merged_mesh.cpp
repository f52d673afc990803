#include "mesh/merged_mesh.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/require.hpp"
#include "comm/single_rank.hpp"
#include "mesh/mesh_info.hpp"
#include "mesh/mesh_state.hpp"

namespace fsdp {
namespace {

using State = DeviceMesh::Access::State;

/// This rank's number in the world that the mesh was made from.
int own_rank(const DeviceMesh& mesh) {
  const auto steps = row_major_steps(mesh.shape());
  const auto& coordinates = mesh.get_coordinate();
  return mesh.ranks()[static_cast<size_t>(
      std::inner_product(steps.begin(), steps.end(), coordinates.begin(), int64_t{0}))];
}

/// The ranks met by walking `dims` of a mesh of this shape through this rank.
std::vector<int> ranks_along(const std::vector<int64_t>& shape, const std::vector<int>& ranks,
                             const std::vector<int>& dims, int own) {
  for (auto& list : rank_lists(shape, ranks, dims))
    if (std::find(list.begin(), list.end(), own) != list.end()) return std::move(list);
  return {};
}

void append(State& state, const State& of, size_t dim, std::string name) {
  state.shape.push_back(of.shape[dim]);
  state.dim_names.push_back(std::move(name));
  state.coordinates.push_back(of.coordinates[dim]);
  state.groups.push_back(of.groups[dim]);
}

std::vector<std::string> names_of(const DeviceMesh& mesh, const std::vector<int>& dims) {
  std::vector<std::string> names;
  for (const int dim : dims) names.push_back(mesh.dim_names()[static_cast<size_t>(dim)]);
  return names;
}

DeviceMesh make_merged(const DeviceMesh& mesh, const std::vector<std::vector<int>>& dims) {
  State state;
  state.device = mesh.device();
  std::vector<int> all;
  for (const auto& one : dims) {
    const auto names = names_of(mesh, one);
    auto name = fmt::format("{}", fmt::join(names, "_"));
    const auto part = one.size() == 1 ? mesh.submesh(names) : mesh.submesh(names).flatten(name);
    append(state, DeviceMesh::Access::state(part), 0, std::move(name));
    all.insert(all.end(), one.begin(), one.end());
  }
  state.ranks = ranks_along(mesh.shape(), mesh.ranks(), all, own_rank(mesh));
  // A mesh of its own: the world's other ranks are merged alike, but what belongs together there is not known.
  state.root = std::make_shared<RootMesh>(RootMesh{.world = nullptr,
                                                   .shape = state.shape,
                                                   .ranks = state.ranks,
                                                   .post_forward_groups = {},
                                                   .left_out = {}});
  state.root_dims.resize(dims.size());
  std::iota(state.root_dims.begin(), state.root_dims.end(), 0);
  return DeviceMesh::Access::make(std::move(state));
}

std::vector<int> dims_of(const DeviceMesh& mesh, const MeshDimNames& names) {
  std::vector<int> dims;
  for (const auto& name : names.names) dims.push_back(mesh.dim(name));
  return dims;
}

/// The dimensions of a mesh that `named` leaves; throws if one is there twice.
std::vector<int> dims_beside(const DeviceMesh& mesh, const std::vector<int>& named) {
  std::vector<int> others;
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    const auto times = std::count(named.begin(), named.end(), dim);
    require(times <= 1,
            "dp_mesh_dims: \"{}\" is named {} times; each dimension of {} shards or replicates, and is named once",
            mesh.dim_names()[static_cast<size_t>(dim)], times, mesh.to_string());
    if (times == 0) others.push_back(dim);
  }
  return others;
}

}  // namespace

DeviceMesh merged_mesh(const DeviceMesh& mesh, const std::vector<std::vector<int>>& dims) {
  const State& state = DeviceMesh::Access::state(mesh);
  const bool merges = std::any_of(dims.begin(), dims.end(), [](const auto& one) { return one.size() > 1; });
  if (!merges) {
    std::vector<int> all;
    for (const auto& one : dims) all.push_back(one.front());
    return mesh.submesh(names_of(mesh, all));
  }
  std::vector<std::vector<int>> key;
  for (const auto& one : dims) {
    auto& of_root = key.emplace_back();
    for (const int dim : one) of_root.push_back(state.root_dims[static_cast<size_t>(dim)]);
  }
  auto& known = state.root->merged[key];
  if (!known) known = make_merged(mesh, dims);
  return known;
}

DeviceMesh joined_mesh(const DeviceMesh& first, const DeviceMesh& second) {
  const State& one = DeviceMesh::Access::state(first);
  const State& other = DeviceMesh::Access::state(second);
  require(one.root == other.root,
          "{} and {} are to be used together, but they were not cut from one mesh; take both from it by name, "
          "mesh[\"dp\"] and mesh[\"tp\"], or give the whole mesh with dp_mesh_dims",
          first.to_string(), second.to_string());
  State state;
  state.device = one.device;
  state.root = one.root;
  for (const State* part : {&one, &other})
    for (size_t dim = 0; dim < part->shape.size(); ++dim) {
      const int root_dim = part->root_dims[dim];
      require(std::find(state.root_dims.begin(), state.root_dims.end(), root_dim) == state.root_dims.end(),
              "{} and {} are to be used together, but have a dimension in common; expected others",
              first.to_string(), second.to_string());
      append(state, *part, dim, part->dim_names.empty() ? "" : part->dim_names[dim]);
      state.root_dims.push_back(root_dim);
    }
  state.ranks = ranks_along(state.root->shape, state.root->ranks, state.root_dims, own_rank(first));
  return DeviceMesh::Access::make(std::move(state));
}

MeshInfo make_mesh_info(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  const auto shard = dims_of(mesh, dims.shard), replicate = dims_of(mesh, dims.replicate);
  require(!shard.empty() || !replicate.empty(),
          "dp_mesh_dims: names no dimension; name those of {} that shard, that replicate, or both",
          mesh.to_string());
  std::vector<int> named = replicate;
  named.insert(named.end(), shard.begin(), shard.end());
  const auto others = dims_beside(mesh, named);
  std::vector<std::vector<int>> parts;
  if (!replicate.empty()) parts.push_back(replicate);
  if (!shard.empty()) parts.push_back(shard);
  auto info = make_mesh_info(merged_mesh(mesh, parts), shard.empty() ? MeshUse::kReplicateOnly : MeshUse::kShard);
  info.unmerged = mesh.submesh(names_of(mesh, named));
  if (others.empty()) return info;
  for (const int dim : others) parts.push_back({dim});
  info.others = mesh.submesh(names_of(mesh, others));
  info.whole = merged_mesh(mesh, parts);
  return info;
}

MeshInfo replicate_beside(const MeshInfo& info) {
  MeshInfo beside = info;
  beside.use = MeshUse::kReplicateBeside;
  beside.shard_group = single_rank_on(info.mesh.device_type());
  if (info.replicate_size() == 1) beside.replicate_group = info.shard_group;
  if (info.replicate_size() == 1 || info.shard_size() == 1) return beside;
  const auto& mesh = info.unmerged.defined() ? info.unmerged : info.mesh;
  std::vector<int> all(static_cast<size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), 0);
  beside.replicate_group = make_mesh_info(merged_mesh(mesh, {all}), MeshUse::kReplicateOnly).replicate_group;
  return beside;
}

}  // namespace fsdp
