#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// Along which dimension, and over which mesh, a parameter is sharded: the result of FullyShardOptions::shard_placement_fn.
struct FSDP_API ShardPlacementResult {
  ShardPlacementResult(Shard shard = {}, DeviceMesh own_mesh = {}, DeviceMesh differing_over = {})
      : placement(shard), mesh(std::move(own_mesh)), differs_over(std::move(differing_over)) {}

  Shard placement;
  /// The parameter's data-parallel mesh, such as mesh["edp"] for an expert. Default: fully_shard's. One dimension shards; of
  /// two, the first replicates and the second shards.
  DeviceMesh mesh;
  /// A mesh whose ranks hold different tensors under this name, as expert-parallel ranks hold different experts. Gradient norms
  /// then add up over this mesh as well. All its ranks have to say so for their parameter. Default: ranks outside `mesh`
  /// hold the same tensor. Not needed with `tensor_parallel_fn`.
  DeviceMesh differs_over;
};

/// Which part of a whole tensor the module's local tensor is: the result of FullyShardOptions::tensor_parallel_fn.
struct FSDP_API TensorParallel {
  /// One for each dimension of `mesh`. Shard: chunks of ceil(n / ranks), so the last ranks may hold less. Replicate: all ranks
  /// hold the same values and get the same gradient.
  std::vector<Placement> placements;
  /// The whole tensor's sizes. Empty: the local sizes times the number of ranks of each dimension that shards.
  std::vector<int64_t> sizes = {};
  /// The tensor-parallel dimensions, such as mesh["tp"], from the same mesh as the data-parallel ones. Default: the dimensions
  /// that fully_shard's dp_mesh_dims does not name.
  DeviceMesh mesh = {};
};

}  // namespace fsdp
