#include "mesh/mesh_info.hpp"

#include <fmt/ranges.h>

#include <numeric>

#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/debug/fake_collectives.hpp"
#include "comm/single_rank.hpp"
#include "mesh/mesh_state.hpp"

namespace fsdp {

std::vector<Placement> MeshInfo::placements() const {
  std::vector<Placement> placements(static_cast<size_t>(mesh.ndim()), Replicate{});
  if (use == MeshUse::kShard) placements.back() = Shard{0};
  return placements;
}

MeshInfo make_mesh_info(const DeviceMesh& mesh, MeshUse use) {
  const int ndim = mesh.ndim();
  auto& left_out = DeviceMesh::Access::state(mesh).root->left_out;
  auto group = [&](int dim) {
    auto& known = left_out[mesh.get_group(dim)];
    if (!known) known = with_fake_collectives(mesh.get_group(dim));
    return known;
  };
  if (use == MeshUse::kReplicateOnly) {
    require(ndim == 1,
            "{}: replicating without sharding takes one dimension, got {}; pass a sub-mesh "
            "(mesh[\"name\"]) or mesh.flatten(\"name\")",
            mesh.to_string(), ndim);
    return {.mesh = mesh,
            .shard_group = single_rank_on(mesh.device_type()),
            .replicate_group = group(0),
            .use = MeshUse::kReplicateOnly};
  }
  require(ndim <= 2,
          "{}: sharding takes one dimension (shard) or two (replicate, shard), got {}; pass the "
          "sub-mesh of the data-parallel ones, mesh.submesh({{...}}), or name them in dp_mesh_dims",
          mesh.to_string(), ndim);
  if (ndim == 1) return {.mesh = mesh, .shard_group = group(0), .replicate_group = nullptr};
  return {.mesh = mesh, .shard_group = group(1), .replicate_group = group(0)};
}

int MeshInfo::world_rank() const {
  const auto& group = group_in_world();
  return group.ranks()[static_cast<size_t>(group.rank())];
}

namespace {

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= number; ++d)
    if (number % d == 0) found.push_back(d);
  return found;
}

/// Every member of the shard group makes all groups in this order, see Note [One fixed order].
std::shared_ptr<Communicator> make_post_forward_groups(Communicator& shard_group, int ranks) {
  std::shared_ptr<Communicator> mine;
  for (int begin = 0; begin < shard_group.size(); begin += ranks) {
    std::vector<int> members(ranks);
    std::iota(members.begin(), members.end(), begin);
    if (auto group = shard_group.split(members, "post_forward")) mine = std::move(group);
  }
  return mine;
}

}  // namespace

void check_reshard_ranks(const MeshInfo& info, int64_t ranks) {
  const int64_t shard_size = info.shard_size();
  if (ranks < 1 || ranks > shard_size || shard_size % ranks != 0)
    throw UsageError(fmt::format(
        "reshard_after_forward: expected an integer that divides the shard size {} of {}, got {}; use one "
        "of {}, or true or false",
        shard_size, info.mesh.to_string(), ranks, fmt::join(divisors(shard_size), ", ")));
}

ReshardPlan make_reshard_plan(const MeshInfo& info, int64_t ranks) {
  check_reshard_ranks(info, ranks);
  const int64_t shard_size = info.shard_size();
  if (ranks == 1) {
    warn_once("reshard_after_forward: 1 keeps the parameters unsharded after forward, as false does; "
              "say false if that is meant");
    return {.reshard = false, .ranks = 1, .post_forward_group = nullptr};
  }
  if (ranks == shard_size) return {.reshard = true, .ranks = ranks, .post_forward_group = nullptr};

  auto& made = DeviceMesh::Access::state(info.mesh).root->post_forward_groups;
  const auto key = std::pair<const Communicator*, int64_t>(info.shard_group.get(), ranks);
  auto found = made.find(key);
  if (found == made.end()) {
    auto group = make_post_forward_groups(*info.shard_group, static_cast<int>(ranks));
    found = made.emplace(key, RootMesh::PostForwardGroup{info.shard_group, std::move(group)}).first;
  }
  return {.reshard = true, .ranks = ranks, .post_forward_group = found->second.group};
}

}  // namespace fsdp
