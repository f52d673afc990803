#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// Where one parameter is cut, and over which ranks: what FullyShardOptions::shard_placement_fn returns.
struct ShardPlacementResult {
  ShardPlacementResult(Shard shard = {}, DeviceMesh own_mesh = {}, DeviceMesh differing_over = {})
      : placement(shard), mesh(std::move(own_mesh)), differs_over(std::move(differing_over)) {}

  Shard placement;
  /// Its data-parallel ranks, such as mesh["edp"] for an expert; undefined: fully_shard's. One dimension
  /// shards, of two the first replicates, as for fully_shard.
  DeviceMesh mesh;
  /// Ranks along this mesh hold other tensors under this name, as expert-parallel ranks hold other experts:
  /// norms of gradients add up over it, too. All its ranks have a parameter that says so. Undefined: the
  /// ranks outside `mesh` hold the same. Not beside `tensor_parallel_fn`, which says it by itself.
  DeviceMesh differs_over;
};

/// What the tensor that a module holds is a part of: the result of FullyShardOptions::tensor_parallel_fn.
struct TensorParallel {
  /// One for each dimension of `mesh`: Shard (in chunks of ceil(n / ranks), so that trailing ranks may hold
  /// less) or Replicate, where ranks hold the same and get the same gradient.
  std::vector<Placement> placements;
  /// Of the whole tensor. Empty: the local sizes times the ranks of each dimension that shards.
  std::vector<int64_t> sizes = {};
  /// The dimensions of tensor parallelism, a part of the same mesh as the data-parallel ones, such as
  /// mesh["tp"]. Undefined: what fully_shard's dp_mesh_dims does not name.
  DeviceMesh mesh = {};
};

}  // namespace fsdp
