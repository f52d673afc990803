#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// A tensor spread over a mesh: this rank's piece together with what is needed to know the whole.
/// A plain value; it communicates only where a method says so.
class DTensor {
 public:
  DTensor() = default;

  /// Wraps this rank's piece. `sizes` and `strides` are the whole tensor's; without them the local
  /// sizes times the mesh size of each sharded dimension, in row-major order. No communication.
  ///
  /// Placements act left to right: a second Shard of one dimension cuts what the first one left.
  /// Shard(0) of a 0-dim tensor (`sizes` must say so: an empty list) gives it to rank 0; the others
  /// hold size {0}.
  ///
  /// Throws UsageError if placements are not one per mesh dimension, a Shard's dim is out of range,
  /// the local sizes are not those of this rank's piece, the strides leave gaps or overlap, or the tensor
  /// is sparse or on another device type than the mesh's (meta is fine); StateError if this rank
  /// is not a member of the mesh.
  static DTensor from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            at::OptionalIntArrayRef sizes = {}, at::OptionalIntArrayRef strides = {});

  bool defined() const { return local_.defined(); }
  const DeviceMesh& mesh() const { return mesh_; }
  /// One per mesh dimension; a Shard's dimension is never negative.
  const std::vector<Placement>& placements() const { return placements_; }
  c10::IntArrayRef sizes() const { return sizes_; }
  c10::IntArrayRef strides() const { return strides_; }
  int64_t numel() const;
  c10::ScalarType dtype() const { return local_.scalar_type(); }
  /// This rank's piece; it shares memory with what it was made from.
  const at::Tensor& to_local() const { return local_; }

  /// The whole tensor with its global strides, on every rank, outside autograd. Communicates over every
  /// mesh dimension that shards or is partial: a collective call. Padding of uneven pieces is cut
  /// off. Any dtype; a Partial sum of bool is an "or". Shares memory with the local piece where that
  /// is the whole already. Meta stays meta and communicates nothing.
  at::Tensor full_tensor() const;

 private:
  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  std::vector<int64_t> sizes_, strides_;
  at::Tensor local_;
};

/// Spreads `tensor`, which every rank holds, over `mesh`: each rank keeps its own piece, a copy on the
/// mesh's device that requires grad if `tensor` does.
/// With `kBroadcastFromRank0` the values of the mesh's first rank win, and it is a collective call;
/// otherwise no communication.
/// Throws as DTensor::from_local does, and UsageError for a Partial placement.
enum class DistributeSource { kEachRankHasIt, kBroadcastFromRank0 };
DTensor distribute_tensor(const at::Tensor& tensor, DeviceMesh mesh,
                          std::vector<Placement> placements,
                          DistributeSource source = DistributeSource::kEachRankHasIt);

}  // namespace fsdp
