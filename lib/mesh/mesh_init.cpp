#include "mesh/mesh_init.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/require.hpp"
#include "comm/watch/awaited_collectives.hpp"
#include "mesh/mesh_device.hpp"
#include "mesh/mesh_state.hpp"

namespace fsdp {
namespace {

using State = DeviceMesh::Access::State;

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

void check_names(const std::vector<std::string>& names, size_t ndim) {
  require(names.size() == ndim || (names.empty() && ndim == 1),
          "device mesh: expected {} dimension name(s), one for each dimension, got {}", ndim,
          names.size());
  std::set<std::string> seen;
  for (const std::string& name : names) {
    require(!name.empty(), "device mesh: dimension names must not be empty, got ({})",
            fmt::join(names, ", "));
    require(seen.insert(name).second,
            "device mesh: dimension names must differ, got \"{}\" twice; rename one", name);
  }
}

void check_ranks(const std::vector<int>& ranks, int world_size) {
  std::set<int> seen;
  for (const int rank : ranks) {
    require(rank >= 0 && rank < world_size,
            "device mesh: expected ranks of a world of {}, that is 0 to {}, got {}", world_size,
            world_size - 1, rank);
    require(seen.insert(rank).second, "device mesh: each rank may appear once, got {} twice in ({})",
            rank, fmt::join(ranks, ", "));
  }
}

void check_shape(const std::vector<int64_t>& shape, size_t rank_count, std::string_view of_what) {
  require(!shape.empty(), "device mesh: the shape needs at least one dimension, got ()");
  int64_t positions = 1;
  for (const int64_t size : shape) {
    require(size >= 1, "device mesh: every dimension needs a size of at least 1, got shape {}",
            shape_text(shape));
    positions *= size;
  }
  require(positions == static_cast<int64_t>(rank_count),
          "device mesh: shape {} has room for {} rank(s), but {} {}; change the shape or pass as many "
          "ranks in DeviceMeshOptions::ranks",
          shape_text(shape), positions, of_what, rank_count);
}

/// Returns the coordinates of `rank`; empty if it is not a member.
std::vector<int64_t> coordinates_of(const State& state, int rank) {
  const auto found = std::find(state.ranks.begin(), state.ranks.end(), rank);
  if (found == state.ranks.end()) return {};
  int64_t position = found - state.ranks.begin();
  std::vector<int64_t> coordinates;
  for (const int64_t step : row_major_steps(state.shape)) {
    coordinates.push_back(position / step);
    position %= step;
  }
  return coordinates;
}

void set_root(State& state, std::shared_ptr<Communicator> world) {
  state.root = std::make_shared<RootMesh>(RootMesh{.world = std::move(world),
                                                   .shape = state.shape,
                                                   .ranks = state.ranks,
                                                   .post_forward_groups = {},
                                                   .left_out = {}});
  state.root_dims.resize(state.shape.size());
  std::iota(state.root_dims.begin(), state.root_dims.end(), 0);
}

int world_rank(const Communicator& group) { return group.ranks()[group.rank()]; }

std::string names_of(const std::vector<std::shared_ptr<Communicator>>& groups) {
  std::vector<std::string> names;
  for (const auto& group : groups) names.push_back(group->name());
  return fmt::format("{}", fmt::join(names, " and "));
}

/// The ranks of a mesh with these groups through this rank, row-major. A group names one line of it; the lines
/// beside it lie as far from it as their members of the other groups do: so in every mesh that is a regular
/// slice of a world.
std::vector<int> ranks_through(const std::vector<std::shared_ptr<Communicator>>& groups) {
  const Communicator* first = nullptr;
  std::vector<int> ranks = {groups.front()->ranks()[0]};  // of one rank alone
  for (const auto& group : groups) {
    // A group of one rank alone does not say which rank of the world that is.
    if (group->size() == 1) continue;
    if (first == nullptr) {
      first = group.get();
      ranks = {world_rank(*group)};
    }
    require(world_rank(*group) == world_rank(*first),
            "mesh from groups: all groups must meet in this rank, but it is rank {} of the world in {} and rank {} in "
            "{}; split them from one world",
            world_rank(*first), first->name(), world_rank(*group), group->name());
    std::vector<int> wider;
    for (const int rank : ranks)
      for (const int other : group->ranks()) wider.push_back(rank + other - world_rank(*group));
    ranks = std::move(wider);
  }
  return ranks;
}

}  // namespace

DeviceMesh init_device_mesh(std::shared_ptr<Communicator> world, const std::vector<int64_t>& shape,
                            const std::vector<std::string>& dim_names,
                            const DeviceMeshOptions& options) {
  require(world != nullptr, "device mesh: expected a world, got null; make one with init_process_group");
  State state;
  state.shape = shape;
  state.dim_names = dim_names;
  state.ranks = options.ranks;
  if (state.ranks.empty()) {
    state.ranks.resize(world->size());
    std::iota(state.ranks.begin(), state.ranks.end(), 0);
  }
  // All checks come before the first group is made, so that a wrong call leaves nothing behind.
  check_ranks(state.ranks, world->size());
  check_shape(shape, state.ranks.size(),
              options.ranks.empty() ? "the size of the world is" : "the number of ranks given is");
  check_names(dim_names, shape.size());
  state.device = device_of_rank(options.device_type.value_or(world->device_type()));

  state.coordinates = coordinates_of(state, world->rank());
  for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim)
    state.groups.push_back(make_groups(*world, dim_names.empty() ? "" : dim_names[dim],
                                       rank_lists(shape, state.ranks, {dim})));
  set_root(state, std::move(world));
  return DeviceMesh::Access::make(std::move(state));
}

DeviceMesh mesh_of_groups(const std::vector<std::shared_ptr<Communicator>>& groups,
                          std::vector<std::string> dim_names) {
  require(!groups.empty(), "mesh from groups: expected a group for each dimension, got none");
  for (const auto& group : groups)
    require(group != nullptr, "mesh from groups: expected groups that this rank is a member of, got null");
  State state;
  state.device = device_of_rank(groups.front()->device_type());
  state.dim_names = std::move(dim_names);
  for (const auto& group : groups) {
    state.shape.push_back(group->size());
    state.coordinates.push_back(group->rank());
  }
  state.groups = groups;
  state.ranks = ranks_through(groups);
  require(std::set<int>(state.ranks.begin(), state.ranks.end()).size() == state.ranks.size(),
          "mesh from groups: {} share more than this rank; expected groups that have only this rank in common",
          names_of(groups));
  check_names(state.dim_names, state.shape.size());
  set_root(state, nullptr);
  return DeviceMesh::Access::make(std::move(state));
}

DeviceMesh DeviceMesh::from_group(const std::vector<std::shared_ptr<Communicator>>& groups,
                            const std::vector<std::string>& dim_names) {
  require(groups.size() == 1 || groups.size() == 2,
          "mesh from groups: expected one group or (shard, replicate), got {} groups; for more "
          "dimensions use init_device_mesh",
          groups.size());
  if (groups.size() == 1) return mesh_of_groups(groups, dim_names);
  return mesh_of_groups({groups[1], groups[0]},
                        dim_names.empty() ? std::vector<std::string>{"replicate", "shard"} : dim_names);
}

int64_t ranks_per_node(Communicator& world, const LaunchEnvironment& launch) {
  const at::Tensor own = at::tensor({int64_t{launch.local_world_size}, int64_t{launch.local_rank}})
                             .to(device_of_rank(world.device_type()));
  const at::Tensor all = at::empty({world.size(), 2}, own.options());
  awaited::all_gather(world, all, own, "hybrid mesh");

  const at::Tensor on_host = all.to(c10::kCPU);
  const int64_t* rows = on_host.const_data_ptr<int64_t>();
  const int64_t per_node = rows[0];
  std::vector<int64_t> node_sizes, local_ranks;
  bool is_equal = world.size() % per_node == 0, is_contiguous = true;
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    node_sizes.push_back(rows[2 * rank]);
    local_ranks.push_back(rows[2 * rank + 1]);
    is_equal &= node_sizes.back() == per_node;
    is_contiguous &= local_ranks.back() == rank % per_node;
  }
  require(is_equal,
          "hybrid mesh: every node needs the same number of ranks, but the local world sizes of ranks 0 to "
          "{} are {}; start equal nodes or arrange the ranks with init_device_mesh",
          world.size() - 1, fmt::join(node_sizes, ", "));
  require(is_contiguous,
          "hybrid mesh: ranks must be numbered node by node, but the local ranks of ranks 0 to {} are {}; "
          "let the launcher fill node after node or arrange the ranks with init_device_mesh",
          world.size() - 1, fmt::join(local_ranks, ", "));
  return per_node;
}

DeviceMesh hybrid_mesh_for(std::shared_ptr<Communicator> world, const LaunchEnvironment& launch) {
  require(world != nullptr, "hybrid mesh: expected a world, got null; make one with init_process_group");
  const int64_t per_node = ranks_per_node(*world, launch);
  const int64_t nodes = world->size() / per_node;
  return init_device_mesh(std::move(world), {nodes, per_node}, {"replicate", "shard"});
}

DeviceMesh hybrid_mesh(std::shared_ptr<Communicator> world) {
  return hybrid_mesh_for(std::move(world), launch_environment());
}

}  // namespace fsdp
