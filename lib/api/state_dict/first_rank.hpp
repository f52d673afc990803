#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "api/state_dict/named_states.hpp"

// What the first rank of a mesh does for all, and how ranks find out that they disagree.
namespace fsdp {

/// The data-parallel mesh whose first rank is "rank 0" for this module: that of its outermost sharded module, or
/// of the group that its first sharded parameter belongs to. Undefined where nothing is sharded.
DeviceMesh leading_mesh(const torch::nn::Module& module, const std::optional<FoundParam>& first);

/// Whose first rank keeps, or passes, a dict's values.
struct LeadingMesh {
  DeviceMesh data;  ///< see above
  DeviceMesh all;   ///< with the dimensions of tensor parallelism, whose ranks have whole tensors together

  /// False for a parameter on a mesh of its own that is a part of the module's.
  bool is_of_all(const std::optional<FoundParam>& param) const;
  /// This rank keeps what goes to the first rank alone: `all`'s, or that of the parameter's own mesh.
  bool keeps(const std::optional<FoundParam>& param) const;
  /// Throws UsageError, on all ranks, for a parameter that not all of them have.
  void require_all(const std::vector<NamedState>& states, std::string_view caller) const;
};
LeadingMesh leading_mesh(const torch::nn::Module& module, const std::vector<NamedState>& states);

/// The first rank's text, on every rank. A collective call.
std::string broadcast_text(const std::string& text, const DeviceMesh& mesh, const std::string& subject);

/// Something about a parameter on which all ranks that share it have to agree.
struct ParamFact {
  FoundParam param;
  std::string fact;
};
/// Throws StateError with `message`, on every rank, unless the facts are the same on all ranks of each
/// shard group. A collective call: one small all-reduce for each of these.
void require_same_facts(const std::vector<ParamFact>& facts, const char* caller, const std::string& message);

}  // namespace fsdp
