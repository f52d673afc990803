#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// What data parallelism does with a mesh: FSDP2's FSDPMeshInfo, HSDPMeshInfo and DDPMeshInfo as
/// one value.
struct MeshInfo {
  DeviceMesh mesh;
  /// Ranks that share one copy of the parameters. Never null: one rank alone where nothing is sharded.
  std::shared_ptr<Communicator> shard_group;
  /// Ranks that hold the same piece. Null for plain FSDP (1-D, sharded).
  std::shared_ptr<Communicator> replicate_group;

  int shard_size() const { return shard_group->size(); }
  int shard_rank() const { return shard_group->rank(); }
  /// 1 where nothing is replicated.
  int replicate_size() const { return replicate_group ? replicate_group->size() : 1; }
  int replicate_rank() const { return replicate_group ? replicate_group->rank() : 0; }
  /// How many batches a step averages over.
  int data_parallel_size() const { return shard_size() * replicate_size(); }
  /// One per mesh dimension: {Shard(0)}, {Replicate, Shard(0)} or {Replicate}.
  std::vector<Placement> placements() const;
};

enum class MeshUse { kShard, kReplicateOnly };

/// Gives the mesh's dimensions their parts: of one, it shards (or replicates); of two, the first
/// replicates and the second shards. No communication.
/// Throws UsageError if the mesh is undefined or has more dimensions than the use allows, StateError if
/// this rank is not a member.
MeshInfo make_mesh_info(const DeviceMesh& mesh, MeshUse use);

/// What an integer `reshard_after_forward` means on a mesh (M4).
struct ReshardPlan {
  /// False: parameters stay unsharded after forward.
  bool reshard = true;
  /// How many ranks share one copy between forward and backward: 1 if nothing is resharded, the
  /// shard size for a full reshard.
  int64_t ranks = 1;
  /// The `ranks` ranks that gather together in backward, in shard order: shard ranks
  /// j * ranks .. (j + 1) * ranks of one replica. Null unless 1 < ranks < shard size.
  std::shared_ptr<Communicator> post_forward_group;
};

/// The plan for groups of `ranks` ranks. 1 warns once and means false; the shard size means true.
///
/// A collective call over the shard group where it needs groups: all its ranks create all of them
/// in one fixed order. The same request on the same mesh (or one derived from it) reuses them.
/// Throws UsageError naming `ranks`, the shard size and its divisors unless `ranks` is one of them.
ReshardPlan make_reshard_plan(const MeshInfo& info, int64_t ranks);

}  // namespace fsdp
