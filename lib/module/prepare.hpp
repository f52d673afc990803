#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "group/edit/group_edit.hpp"
#include "module/make_groups.hpp"
#include "module/managed_states.hpp"
#include "module/module_walk.hpp"
#include "module/param_targets.hpp"
#include "module/state/owned_group.hpp"
#include "module/state/shard_request.hpp"
#include "module/state/tree_position.hpp"

namespace fsdp {

/// What fully_shard is about to change. The modules are as they were; this rank's rows have been copied.
struct Prepared {
  ShardRequest request;
  std::vector<torch::nn::Module*> modules = {};  ///< each once
  std::vector<Unit> units = {};                  ///< the same ones
  ModuleWalk walk = {};
  ManagedStates states = {};
  std::vector<ParamTarget> places = {};     ///< of the states' parameters
  std::vector<PreparedGroup> groups = {};  ///< none if there is nothing to shard
  std::vector<OwnedGroup> owned = {};      ///< of these groups, without registrations
  /// Groups that give up tied parameters to these.
  struct GivenUp {
    std::shared_ptr<ParamGroup> by;
    GroupEdit edit;
  };
  std::vector<GivenUp> given_up = {};
};

/// All that may fail of fully_shard: checks, and the groups with their values. A collective call with
/// sync_from_rank0, and where groups of ranks are made.
///
/// like: the state of modules with the same parameters, whose ranks hold what they are to hold here; null:
/// the options say.
Prepared prepare(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options,
                 const ModuleState* like);

/// Does the same for what was registered below a sharded module since it was sharded: the groups are further ones of its state.
/// Parameters that are sharded already, and what was ignored, stay out. `modules` is empty where the module is gone.
Prepared prepare_late(ModuleState& state);

}  // namespace fsdp
