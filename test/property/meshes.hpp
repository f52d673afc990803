#pragma once

#include <optional>

#include "property/random_tree.hpp"

namespace fsdp::test {

/// Where a parameter is spread.
enum class Where {
  kModule,   ///< as the module is
  kOther,    ///< over the same ranks in another shape
  kExperts,  ///< over the ranks that have the same expert
};

/// The meshes of a draw, on one rank. All ranks make them together.
struct DrawnMeshes {
  DeviceMesh given;  ///< to fully_shard, with `dims`
  std::optional<DataParallelMeshDims> dims = {};
  DeviceMesh tensor = {};  ///< tensor-parallel ranks; undefined: none
  DeviceMesh other = {}, tensor_beside_other = {};
  DeviceMesh experts = {}, expert_ranks = {};  ///< that have the same, and that have different ones

  const DeviceMesh& own(Where where) const { return where == Where::kOther ? other : experts; }
};

DrawnMeshes make_meshes(const Rank& rank, const RandomTree& tree);

/// Of how many ranks' gradients the average is, and over how many of them a parameter is cut there.
struct Spread {
  int64_t ranks = 1, replicas = 1;
};
Spread spread_of(const RandomTree& tree, Where where, bool is_replicated);

}  // namespace fsdp::test
