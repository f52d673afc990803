#include "mesh/separate_group.hpp"

#include <numeric>

#include "mesh/mesh_state.hpp"

namespace fsdp {

std::shared_ptr<Communicator> separate_group_of(const MeshInfo& info) {
  // Not kept for as long as somebody uses it: when a root goes may differ between ranks, and then one of them would
  // make a communicator that the others have.
  auto& made = DeviceMesh::Access::state(info.mesh).root->separate_groups;
  auto& known = made[info.shard_group];
  if (!known) {
    std::vector<int> all(static_cast<size_t>(info.shard_size()));
    std::iota(all.begin(), all.end(), 0);
    known = info.shard_group->split(all, "reduce_scatter");
  }
  return known;
}

}  // namespace fsdp
