#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "group/param_group.hpp"
#include "module/state/module_state.hpp"

namespace fsdp {

/// A module's parameters and buffers, each tensor once, under its first name in depth-first order.
struct TreeEntry {
  at::Tensor tensor;                  ///< as the module's table holds it
  std::string name;                   ///< from the module the walk began at
  size_t owner;                       ///< which of the modules registers it first
  std::shared_ptr<ParamGroup> group;  ///< null if it is not sharded
  size_t index = 0;                   ///< in the group
};

/// What is below a module, sharded or not.
struct ModuleTree {
  struct Node {
    torch::nn::Module* module;
    std::string path;  ///< "" for the first
  };
  std::vector<Node> modules;  ///< each once, an outer one before those in it
  std::vector<size_t> innermost_first;
  std::vector<TreeEntry> parameters, buffers;
  std::vector<std::shared_ptr<ModuleState>> states;  ///< of the sharded modules among them
  std::vector<std::shared_ptr<ParamGroup>> groups;   ///< theirs
};

/// Changes nothing. Throws UsageError, on behalf of `caller`, if the tree holds a part of a group
/// only.
ModuleTree walk_tree(torch::nn::Module& module, const char* caller);

}  // namespace fsdp
