#pragma once

#include "fsdp/device_mesh.hpp"

namespace fsdp {

/// The 1-D mesh ("shard") over the process's default world, which is made now if there is none. The
/// same mesh, with the groups made from it, until destroy_process_group().
/// Throws what default_process_group() throws; ranks that are threads have no default.
DeviceMesh default_device_mesh();

}  // namespace fsdp
