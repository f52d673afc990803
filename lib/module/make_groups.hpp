#pragma once

#include <memory>
#include <vector>

#include "module/managed_states.hpp"
#include "module/module_state.hpp"

namespace fsdp {

/// A group that fully_shard is about to attach: the modules are as they were.
struct PreparedGroup {
  MeshInfo mesh_info;
  std::vector<size_t> params = {};  ///< of the managed states, by index in the group
  std::shared_ptr<ParamGroup> group = {};
};

/// Throws UsageError for options that contradict each other.
void check_options(const FullyShardOptions& options);

/// The groups that the states make, complete but not attached; none if there are no parameters.
/// like: a state of modules with the same parameters, whose ranks hold what they are to hold here; null: the
/// options say.
std::vector<PreparedGroup> make_groups(const ManagedStates& states, const ModuleState& state,
                                       const FullyShardOptions& options, const ModuleState* like);

}  // namespace fsdp
