#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "fsdp/fully_shard_options.hpp"
#include "mesh/mesh_info.hpp"

namespace fsdp {

/// What fully_shard was asked for, so that a copy of the module can be sharded alike. It keeps no tensor and no module
/// alive.
struct ShardRequest {
  FullyShardOptions options = {};  ///< as given, or as set since, without what was ignored or replicated
  MeshInfo mesh_info = {};         ///< of the mesh that fully_shard was given, or the default one
  bool is_exempt = false;          ///< mixed precision leaves all of its modules alone: fsdp::call casts to their dtype
  std::vector<std::weak_ptr<torch::nn::Module>> ignored_modules = {};  ///< as given
  std::unordered_set<const c10::TensorImpl*> ignored = {};  ///< parameters: its own and what it inherited
};

}  // namespace fsdp
