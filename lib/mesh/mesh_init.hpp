#pragma once

#include "fsdp/device_mesh.hpp"
#include "fsdp/launch_environment.hpp"

namespace fsdp {

/// `hybrid_mesh` for a rank that was started as `launch` says. A collective call over `world`.
DeviceMesh hybrid_mesh_for(std::shared_ptr<Communicator> world, const LaunchEnvironment& launch);

}  // namespace fsdp
