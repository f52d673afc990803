#pragma once

#include <unordered_set>
#include <vector>

#include "fsdp/fully_shard_options.hpp"
#include "mesh/mesh_info.hpp"
#include "module/managed_states.hpp"
#include "tensor/tensor_part.hpp"

namespace fsdp {

/// Over which ranks one parameter goes, and where it is cut.
struct ParamTarget {
  MeshInfo mesh_info;
  int64_t dim = 0;  ///< that is cut, in the per-parameter layout
  ParamReach reach = {};
  bool is_replicated = false;  ///< over all ranks of its mesh, once `replicate` has made groups of them
};

/// The mesh that fully_shard was given, or the default one, as the options say to use it. A collective call
/// where dp_mesh_dims makes several dimensions one, the first time.
MeshInfo own_mesh_info(const FullyShardOptions& options);

/// What the options say is replicated, of the trees of `modules`: parameters as the modules hold them.
/// Throws UsageError for one that is ignored as well.
std::unordered_set<const c10::TensorImpl*> replicated_params(const std::vector<torch::nn::Module*>& modules,
                                                             const FullyShardOptions& options,
                                                             const ModuleWalk& walk);

/// A place for each of the states' parameters. own: the module's mesh. No communication. Throws UsageError.
std::vector<ParamTarget> find_targets(const ManagedStates& states, const MeshInfo& own,
                                     const FullyShardOptions& options,
                                     const std::unordered_set<const c10::TensorImpl*>& replicated);

/// Parameters that are replicated beside others get the mesh info that says so. A collective call where there
/// are such, the first time on a mesh. Throws UsageError.
void replicate(std::vector<ParamTarget>& places);

/// The places that `like`, the state of modules with the same parameters, has for them.
std::vector<ParamTarget> targets_like(const ManagedStates& states, const ModuleState& like);

/// What is said of a group behind its module's name: "" for the one on the module's own mesh.
std::string suffix_of(const MeshInfo& group, const MeshInfo& own);

}  // namespace fsdp
