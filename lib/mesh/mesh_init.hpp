#pragma once

#include "fsdp/device_mesh.hpp"
#include "fsdp/launch_environment.hpp"

namespace fsdp {

/// How many ranks each node has, as the launcher of this rank (`launch`) and of the others says. A collective call over
/// `world`. Throws UsageError on every rank if nodes have different numbers of ranks, or ranks that are not consecutive.
int64_t ranks_per_node(Communicator& world, const LaunchEnvironment& launch);

/// `hybrid_mesh` for a rank that was started as `launch` says. A collective call over `world`.
DeviceMesh hybrid_mesh_for(std::shared_ptr<Communicator> world, const LaunchEnvironment& launch);

/// `DeviceMesh::from_group` for any number of dimensions: groups[i] has the ranks that differ from this one in
/// dimension i alone. Throws UsageError like it.
DeviceMesh mesh_of_groups(const std::vector<std::shared_ptr<Communicator>>& groups,
                          std::vector<std::string> dim_names);

}  // namespace fsdp
