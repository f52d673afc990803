#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/tree_interval.hpp"
#include "dispatch/param_owner.hpp"
#include "group/group_layout.hpp"
#include "group/group_sanitizer.hpp"
#include "group/group_spec.hpp"
#include "group/edit/local_shards.hpp"
#include "group/shard_buffer.hpp"
#include "param/fsdp_param.hpp"
#include "trace/group_identity.hpp"

namespace fsdp {

struct CommContext;

/// What a group is made of. Whatever gathers a group, releases it or puts it in other memory works on this, and knows
/// nothing else of it.
struct GroupParts {
  OwnerLink link;          ///< to whom operators on its parameters turn, and who it is a part of
  GroupIdentity identity;  ///< its number is the root's to give, names are the module layer's
  GroupConfig config;
  std::vector<FSDPParam> params = {};
  GroupLayout layout = {};
  ShardBuffer shard = {};
  std::unique_ptr<LocalShards> local_shards = nullptr;  ///< what points into it; null until handed out
  TreeInterval tree = {};                               ///< of the owning module; the module layer sets it
  CommContext* comm_ctx = nullptr;                      ///< the root's; null until there is one
  std::unique_ptr<GroupSanitizer> sanitizer = nullptr;  ///< null unless the sanitizer mode is on
  bool computes_in_own_dtype = false;  ///< as full_precision_in_eval has it, and not in the policy's dtype
  bool is_cast = false;                ///< a parameter is gathered in another dtype than it is kept in

  ParamOwner& owner() const { return **link; }
  const std::string& name() const { return identity.name; }
  Communicator& shard_group() const { return *identity.mesh_info.shard_group; }
  /// What collectives are launched on: `comm`, or in the sanitizer mode one that is late.
  Communicator& launched_on(Communicator& comm) const {
    return sanitizer ? sanitizer->late(comm, identity.name) : comm;
  }
  /// One rank and no casts: the unsharded parameters alias the sharded ones for ever.
  bool is_never_released() const {
    return identity.mesh_info.shard_size() == 1 && !is_cast && !config.host_memory;
  }
  /// Bytes of the unsharded parameters, with padding.
  int64_t unsharded_bytes() const { return layout.gathered().total_bytes(); }
  /// Counts these, and what is packed beside them as it is too small to travel by itself.
  int64_t slot_bytes() const {
    return unsharded_bytes() + layout.gathered().tail_bytes() * layout.gathered().world_size();
  }
  /// Says in what operators on parameter `index` return, where it is not their own choice.
  std::optional<at::ScalarType> output_dtype(size_t index) const {
    return computes_in_own_dtype ? std::nullopt : params[index].spec.output_dtype;
  }
  /// A sharded parameter has been written, or its storage replaced, since the versions were followed.
  bool has_writes() const {
    return std::any_of(params.begin(), params.end(), [](const FSDPParam& param) { return param.sharded.was_changed(); });
  }
};

}  // namespace fsdp
