#pragma once

#include <c10/core/Device.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/device_mesh.hpp"

namespace fsdp {

/// The mesh that others were cut from, with the world it lives in: what making more groups needs.
struct RootMesh {
  std::shared_ptr<Communicator> world;  // null for a mesh made from groups
  std::vector<int64_t> shape;
  std::vector<int> ranks;

  /// Groups that `make_reshard_plan` made, by the shard group they were split from and their size.
  /// The value of the key's group keeps the address from being used again.
  struct PostForwardGroup {
    std::shared_ptr<Communicator> shard_group, group;
  };
  std::map<std::pair<const Communicator*, int64_t>, PostForwardGroup> post_forward_groups;

  /// What `separate_group_of` made, by the shard group that it was split from, which it keeps alive.
  std::map<std::shared_ptr<Communicator>, std::shared_ptr<Communicator>> separate_groups = {};

  /// What `make_mesh_info` hands out in the place of a group some of whose collectives are left out
  /// (FSDP_FAKE_...): one for each, as groups are told apart by their identity.
  std::map<std::shared_ptr<Communicator>, std::shared_ptr<Communicator>> left_out;

  /// What `merged_mesh` made, by the root's dimensions that make each of its dimensions.
  std::map<std::vector<std::vector<int>>, DeviceMesh> merged = {};
};

struct DeviceMesh::State {
  c10::Device device = c10::kCPU;
  std::vector<int64_t> shape;
  std::vector<std::string> dim_names;
  std::vector<int> ranks;
  std::vector<int64_t> coordinates;                   // empty if this rank is not a member
  std::vector<std::shared_ptr<Communicator>> groups;  // null entries if this rank is not a member
  std::shared_ptr<RootMesh> root;
  std::vector<int> root_dims;  // which dimension of the root each dimension is
};

/// Gives the files of this layer a mesh's state.
struct DeviceMesh::Access {
  using State = DeviceMesh::State;
  /// Throws UsageError for an undefined mesh.
  static const State& state(const DeviceMesh& mesh);
  static DeviceMesh make(State state);
};

/// Row-major positions: what is added to a position for one step in each dimension.
std::vector<int64_t> row_major_steps(const std::vector<int64_t>& shape);

/// The ranks of `mesh_ranks` (row-major in `shape`) met by walking `dims`, in that order, with the
/// other coordinates fixed; one list for each value of the others, in row-major order.
std::vector<std::vector<int>> rank_lists(const std::vector<int64_t>& shape,
                                         const std::vector<int>& mesh_ranks,
                                         const std::vector<int>& dims);

/// Makes the groups of all `lists` (all ranks of `world` call it with the same lists) and returns the
/// one this rank is in, null if none. A list that is the world reuses it; one rank alone needs none.
/// dim_name: what the groups are called, in front of their ranks; may be empty.
std::shared_ptr<Communicator> make_groups(Communicator& world, const std::string& dim_name,
                                          const std::vector<std::vector<int>>& lists);

}  // namespace fsdp
