#pragma once

#include <exception>
#include <span>

#include "group/param_group.hpp"
#include "mesh/mesh_info.hpp"
#include "module/make_groups.hpp"
#include "module/managed_states.hpp"

namespace fsdp {

/// The ranks tell each other whether all have got this far, before they go on with a collective call that not all
/// of them can know of. `failure`: as for agree_on_states, and the same happens. A collective call.
void agree_on_progress(const MeshInfo& info, std::exception_ptr failure);

/// The ranks tell each other whether all have got this far with the same states. `failure`: what
/// this rank's own checks threw, or null; it is thrown again here. Throws UsageError on every other
/// rank then, and on all ranks if names, sizes, strides or dtypes differ. A collective call.
/// What is on a mesh of its own is compared over that mesh, the rest over `info`'s, the module's.
void agree_on_states(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& info,
                     std::exception_ptr failure);

/// Throws UsageError on the first rank of a mesh if one of the states whose values it gives to the others is
/// on the meta device.
void check_source(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& info);

/// Gives the groups' sharded parameters (not attached yet) the values of the first rank of each group's
/// mesh, and the buffers those of the module's. Meta buffers become real. A buffer that has been sent
/// already, with another group, is left alone. A collective call. Throws CommError; buffers are
/// unchanged then.
void send_states(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& info);

}  // namespace fsdp
