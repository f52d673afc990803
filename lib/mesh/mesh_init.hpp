#pragma once

#include "fsdp/device_mesh.hpp"
#include "fsdp/launch_environment.hpp"

namespace fsdp {

/// `hybrid_mesh` for a rank that was started as `launch` says. A collective call over `world`.
DeviceMesh hybrid_mesh_for(std::shared_ptr<Communicator> world, const LaunchEnvironment& launch);

/// `DeviceMesh::from_group` for any number of dimensions: groups[i] has the ranks that differ from this one in
/// dimension i alone. Throws UsageError like it.
DeviceMesh mesh_of_groups(const std::vector<std::shared_ptr<Communicator>>& groups,
                          std::vector<std::string> dim_names);

}  // namespace fsdp
