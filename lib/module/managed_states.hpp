#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "group/group_spec.hpp"
#include "module/module_walk.hpp"
#include "module/state/tie_ledger.hpp"

namespace fsdp {

/// One parameter to shard, with every place in the tree that registers it (ties).
struct ManagedParam {
  at::Tensor unsharded_param;
  std::string name;  ///< relative to its unit, its first name in depth-first order
  size_t unit;       ///< which of the modules that share the group
  std::vector<Registration> registrations;
  bool is_exempt = false;    ///< its first place is
  std::optional<TiedSource> tied = {};  ///< by a sharded module below, which is to give it up
};

struct ManagedBuffer {
  at::Tensor tensor;
  std::string name;        ///< as a parameter's
  bool is_exempt = false;  ///< buffer_dtype is not for it
};

/// The states of the managed modules, each tensor once, without what is ignored.
struct ManagedStates {
  std::vector<ManagedParam> params;
  std::vector<SharedEntry> shared;  ///< entries that hold another group's unsharded parameter
  std::vector<ManagedBuffer> buffers;
};

/// Changes nothing. Throws UsageError for a parameter that another group has sharded already (fully_shard
/// called on an outer module first), and for devices that do not fit `device`.
ManagedStates collect_states(const ModuleWalk& walk, c10::Device device);

}  // namespace fsdp
