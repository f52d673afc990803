#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/mesh_dims.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

enum class MeshUse {
  kShard,
  kReplicateOnly,
  kReplicateBeside,  ///< what is replicated beside a group that shards: integer reshards do not concern it
};

/// What data parallelism does with a mesh: FSDP2's FSDPMeshInfo, HSDPMeshInfo and DDPMeshInfo as
/// one value.
struct MeshInfo {
  DeviceMesh mesh;  ///< data-parallel dimensions: one, or (replicate, shard)
  /// Ranks that share one copy of the parameters. Never null: one rank alone where nothing is sharded.
  std::shared_ptr<Communicator> shard_group;
  /// Ranks that hold the same piece. Null for plain FSDP (1-D, sharded).
  std::shared_ptr<Communicator> replicate_group;
  MeshUse use = MeshUse::kShard;
  /// The other dimensions of the mesh that fully_shard was given, and `mesh`'s followed by these. Both
  /// undefined if there are none.
  DeviceMesh others = {}, whole = {};
  /// `mesh` before several names were made one dimension; undefined: `mesh`.
  DeviceMesh unmerged = {};

  int shard_size() const { return shard_group->size(); }
  int shard_rank() const { return shard_group->rank(); }
  /// 1 where nothing is replicated.
  int replicate_size() const { return replicate_group ? replicate_group->size() : 1; }
  int replicate_rank() const { return replicate_group ? replicate_group->rank() : 0; }
  /// Returns the group that knows this rank in the world that it was split from: where nothing is sharded, only the replicate
  /// group does.
  Communicator& group_in_world() const {
    return shard_size() == 1 && replicate_group ? *replicate_group : *shard_group;
  }
  int world_rank() const;
  /// How many batches a step averages over.
  int data_parallel_size() const { return shard_size() * replicate_size(); }
  /// One per dimension of `mesh`: {Shard(0)}, {Replicate, Shard(0)} or Replicate everywhere.
  std::vector<Placement> placements() const;
};

/// Gives the mesh's dimensions their parts: of one, it shards (or replicates); of two, the first
/// replicates and the second shards. No communication.
/// Throws UsageError if the mesh is undefined or has more dimensions than the use allows, StateError if
/// this rank is not a member.
MeshInfo make_mesh_info(const DeviceMesh& mesh, MeshUse use);

/// Makes a mesh info where names say which dimensions of a mesh of any number shard and which replicate. A collective call over
/// the mesh's world where several names make one dimension, the first time. Throws UsageError, naming the mesh's dimensions,
/// for names that are unknown or repeated, or none.
MeshInfo make_mesh_info(const DeviceMesh& mesh, const DataParallelMeshDims& dims);

/// Replicates over all the data-parallel ranks of `info`. A collective call over the mesh's world where both
/// its dimensions have several ranks, the first time. Throws UsageError if that mesh was made from groups.
MeshInfo replicate_beside(const MeshInfo& info);

/// What an integer `reshard_after_forward` means on a mesh.
struct ReshardPlan {
  /// False: parameters stay unsharded after forward.
  bool reshard = true;
  /// How many ranks share one copy between forward and backward: 1 if nothing is resharded, the
  /// shard size for a full reshard.
  int64_t ranks = 1;
  /// The `ranks` ranks that gather together in backward, in shard order: shard ranks
  /// j * ranks .. (j + 1) * ranks of one replica. Null unless 1 < ranks < shard size.
  std::shared_ptr<Communicator> post_forward_group;

  bool operator==(const ReshardPlan&) const = default;
};

/// Makes the plan for groups of `ranks` ranks. 1 warns once and means false; the shard size means true.
///
/// A collective call over the shard group where it needs groups: all its ranks create all of them
/// in one fixed order. The same request on the same mesh (or one derived from it) reuses them.
/// Throws UsageError naming `ranks`, the mesh, the shard size and its divisors unless `ranks` is one of them.
ReshardPlan make_reshard_plan(const MeshInfo& info, int64_t ranks);
/// Throws what `make_reshard_plan` would throw. No communication.
void check_reshard_ranks(const MeshInfo& info, int64_t ranks);

}  // namespace fsdp
