#pragma once

#include <memory>

#include "mesh/mesh_info.hpp"

namespace fsdp {

/// The ranks of `info`'s shard group over a communicator of their own, for reductions. A collective call over them the
/// first time for a mesh (or one derived from it) and a shard group; it stays as long as that mesh does.
std::shared_ptr<Communicator> separate_group_of(const MeshInfo& info);

}  // namespace fsdp
