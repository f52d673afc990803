#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/reshard_after_forward.hpp"
#include "group/param_group.hpp"
#include "mesh/mesh_info.hpp"
#include "module/state/registration.hpp"

// The groups of one sharded module: one for each mesh that its parameters have, none if there was nothing to shard.
namespace fsdp {

/// A parameter of a group, as the module tree knows it.
struct OwnedParam {
  std::string name;  ///< relative to its unit
  size_t unit;       ///< which of the modules that share the state
};

/// A group, with what only the module tree knows of it. It does not keep the group alive.
struct OwnedGroup {
  std::weak_ptr<ParamGroup> group;
  MeshInfo mesh_info = {};
  std::string suffix = {};                       ///< of its name, behind the module's
  std::vector<OwnedParam> params = {};           ///< by index in the group
  std::vector<Registration> registrations = {};  ///< entries that hold a sharded parameter
  std::optional<ReshardPlan> integer_plan = {};  ///< groups of ranks made when an integer was asked for
};

/// Returns the groups that are alive.
std::vector<std::shared_ptr<ParamGroup>> live_groups(const std::vector<OwnedGroup>& groups);

/// Returns the group on that mesh, with that use of it; null if there is none, or it is gone.
std::shared_ptr<ParamGroup> find_group(const std::vector<OwnedGroup>& groups, const MeshInfo& info);

/// Throws StateError if an entry of a parameter table no longer holds its sharded parameter.
void check_registrations(const OwnedGroup& owned);

// --- reshard_after_forward
/// Throws UsageError if an integer does not fit every group's mesh. No communication.
void check_reshard(const std::vector<OwnedGroup>& groups, ReshardAfterForward request);
/// Makes the groups of ranks that an integer asks for, and forgets those of an earlier one: a collective call the
/// first time. Throws UsageError with nothing changed.
void plan_reshard(std::vector<OwnedGroup>& groups, ReshardAfterForward request);
/// Tells the groups' root what the request comes to; `plan_reshard` has had it. is_root: whose parameters stay if
/// nothing is asked for.
void apply_reshard(const std::vector<OwnedGroup>& groups, ReshardAfterForward request, bool is_root);

}  // namespace fsdp
