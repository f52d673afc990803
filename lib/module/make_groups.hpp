#pragma once

#include <memory>
#include <vector>

#include "module/managed_states.hpp"
#include "module/param_targets.hpp"
#include "module/state/module_state.hpp"

namespace fsdp {

/// A group that fully_shard is about to attach: the modules are as they were.
struct PreparedGroup {
  MeshInfo mesh_info;
  std::string suffix = {};          ///< of its name, behind the module's
  std::vector<size_t> params = {};  ///< of the managed states, by index in the group
  std::shared_ptr<ParamGroup> group = {};
};

/// Throws UsageError for options that contradict each other.
void check_options(const FullyShardOptions& options);

/// The groups that the states make, complete but not attached: one for each mesh that parameters have, in the
/// order of their first ones; none if there are no parameters.
/// places: of the states' parameters. own: the module's. name: what the groups are called until a root names them.
/// like: a state of modules with the same parameters, whose ranks hold what they are to hold here; null: the options
/// say.
std::vector<PreparedGroup> make_groups(const ManagedStates& states, const std::vector<ParamTarget>& places,
                                       const MeshInfo& own, const std::string& name,
                                       const FullyShardOptions& options, const ModuleState* like);

}  // namespace fsdp
