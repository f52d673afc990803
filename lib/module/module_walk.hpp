#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace fsdp {

class ModuleState;

struct WalkedModule {
  torch::nn::Module* module;
  std::string path;  ///< from the module the walk began at; "" for itself
  size_t unit;       ///< which of those
};

/// A sharded module that was met: one of those that share its state.
struct NestedState {
  std::shared_ptr<ModuleState> state;
  const torch::nn::Module* module;
  std::string path;
};

/// What a depth-first walk from the given modules finds.
struct ModuleWalk {
  std::vector<WalkedModule> managed;  ///< each once, in depth-first order
  std::vector<NestedState> nested;    ///< sharded units met and not entered
  std::unordered_set<const c10::TensorImpl*> ignored;  ///< parameters, with what nested units ignore
};

/// Walks the trees of `roots`. Does not enter units that are sharded already, nor modules that the
/// ignore lists take out. A module in `roots` never stops the walk of another. Changes nothing.
/// Throws what check_ignored_modules throws.
ModuleWalk walk_modules(const std::vector<torch::nn::Module*>& roots,
                        const std::vector<at::Tensor>& ignored_params,
                        const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules);

/// Throws UsageError if `ignored_modules` names a root, a sharded unit, or something outside the trees.
void check_ignored_modules(const std::vector<torch::nn::Module*>& roots,
                           const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules);

/// Adds the module and all below it.
void collect_tree(const torch::nn::Module& module, std::unordered_set<const torch::nn::Module*>& tree);

}  // namespace fsdp
