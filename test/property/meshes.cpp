#include "property/meshes.hpp"

namespace fsdp::test {
namespace {

/// A mesh over all ranks, tensor-parallel ones innermost where there are some.
DeviceMesh mesh_of(const Rank& rank, const RandomTree& tree, std::vector<int64_t> shape, std::vector<std::string> names) {
  if (tree.training.tensor_ranks > 1) {
    shape.push_back(tree.training.tensor_ranks);
    names.push_back("tp");
  }
  return init_device_mesh(rank.world(), shape, names);
}

/// Two dimensions that both shard, of all data-parallel ranks.
DeviceMesh merged(const Rank& rank, const RandomTree& tree) {
  const int64_t first = tree.training.world_size % 2 == 0 ? 2 : 1;
  return mesh_of(rank, tree, {first, tree.training.world_size / first}, {"dp", "cp"});
}

void set_module_mesh(DrawnMeshes& meshes, const Rank& rank, const RandomTree& tree) {
  const auto& training = tree.training;
  const bool is_hybrid = training.replicas > 0;
  if (training.tensor_ranks == 1) {
    meshes.given = is_hybrid ? rank.hybrid(training.replicas, training.shard_ranks()) : rank.mesh();
    return;
  }
  if (!is_hybrid && tree.merges_dims) {
    meshes.given = merged(rank, tree);
    meshes.dims = DataParallelMeshDims{.shard = {"dp", "cp"}};
  } else if (is_hybrid) {
    meshes.given = mesh_of(rank, tree, {training.replicas, training.shard_ranks()}, {"replicate", "shard"});
    meshes.dims = DataParallelMeshDims{.shard = "shard", .replicate = "replicate"};
  } else {
    meshes.given = mesh_of(rank, tree, {training.world_size}, {"dp"});
    meshes.dims = training.replicate_only ? DataParallelMeshDims{.replicate = "dp"} : DataParallelMeshDims{.shard = "dp"};
  }
  meshes.tensor = meshes.given["tp"];
  if (tree.names_dims || tree.merges_dims) return;
  meshes.dims.reset();
  meshes.given = is_hybrid ? meshes.given.submesh({"replicate", "shard"}) : meshes.given["dp"];
}

}  // namespace

DrawnMeshes make_meshes(const Rank& rank, const RandomTree& tree) {
  DrawnMeshes meshes;
  set_module_mesh(meshes, rank, tree);
  const bool has_tensor = tree.training.tensor_ranks > 1;
  if (tree.other_mesh_probability > 0) {
    const auto spread = spread_of(tree, Where::kOther, false);
    const bool is_hybrid = tree.other_replicas > 0;
    const auto whole = is_hybrid ? mesh_of(rank, tree, {spread.replicas, spread.ranks}, {"copies", "other"})
                                 : mesh_of(rank, tree, {tree.training.world_size}, {"other"});
    meshes.other = is_hybrid ? whole.submesh({"copies", "other"}) : whole["other"];
    if (has_tensor) meshes.tensor_beside_other = whole["tp"];
  }
  if (tree.expert_ranks > 1) {
    const auto whole =
        mesh_of(rank, tree, {tree.expert_ranks, tree.training.world_size / tree.expert_ranks}, {"ep", "edp"});
    meshes.experts = whole["edp"];
    meshes.expert_ranks = whole["ep"];
  }
  return meshes;
}

Spread spread_of(const RandomTree& tree, Where where, bool is_replicated) {
  const auto& training = tree.training;
  Spread spread{.ranks = training.shard_ranks(), .replicas = training.world_size / training.shard_ranks()};
  if (where == Where::kOther) {
    spread.replicas = std::max<int64_t>(tree.other_replicas, 1);
    spread.ranks = training.world_size / spread.replicas;
  }
  if (where == Where::kExperts) spread = {.ranks = training.world_size / tree.expert_ranks};
  if (is_replicated || training.replicate_only) spread = {.replicas = spread.ranks * spread.replicas};
  return spread;
}

}  // namespace fsdp::test
