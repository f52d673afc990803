#pragma once

#include <exception>
#include <span>

#include "group/param_group.hpp"
#include "mesh/mesh_info.hpp"
#include "module/make_groups.hpp"
#include "module/managed_states.hpp"

namespace fsdp {

/// The ranks tell each other whether all have got this far with the same states. `failure`: what
/// this rank's own checks threw, or null; it is thrown again here. Throws UsageError on every other
/// rank then, and on all ranks if names, sizes, strides or dtypes differ. A collective call.
void agree_on_states(const ManagedStates& states, const MeshInfo& info, std::exception_ptr failure);

/// Throws UsageError on the mesh's first rank if one of its states is on the meta device.
void check_source(const ManagedStates& states, const MeshInfo& info);

/// Gives the groups' registered parameters (not attached yet) and the buffers the mesh's first rank's values (A4). Meta buffers become real. A buffer that has been sent
/// already, with another group, is left alone. A collective call. Throws CommError; buffers are
/// unchanged then.
void send_states(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& info);

}  // namespace fsdp
