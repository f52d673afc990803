#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "fsdp/policy.hpp"

namespace fsdp {

class ModuleState;
struct ShardRequest;

struct WalkedModule {
  torch::nn::Module* module;
  std::string path;  ///< from the module the walk began at; "" for itself
  size_t unit;       ///< which of those
  bool is_exempt;    ///< from mixed precision, or a module around it is
};

/// Empty: no module is.
using IsExempt = std::function<bool(const torch::nn::Module&)>;

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
  IsExempt is_exempt = {};                             ///< as given
};

/// Walks the trees of `roots`. Does not enter units that are sharded already, nor modules that the
/// ignore lists take out. A module in `roots` never stops the walk of another. Changes nothing.
/// is_exempt: holds for all below a module, too. Throws what check_ignored_modules throws.
ModuleWalk walk_modules(const std::vector<torch::nn::Module*>& roots,
                        const std::vector<at::Tensor>& ignored_params,
                        const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules,
                        const IsExempt& is_exempt);

/// What the policy of mixed precision exempts; empty where it casts no parameter.
IsExempt exempted_by(const MixedPrecisionPolicy& policy);

/// Throws UsageError if `ignored_modules` names a root, a sharded unit, or something outside the trees.
void check_ignored_modules(const std::vector<torch::nn::Module*>& roots,
                           const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules);

/// Adds the module and all below it.
void collect_tree(const torch::nn::Module& module, std::unordered_set<const torch::nn::Module*>& tree);

/// Walks modules that are sharded already once more, and ignores what they ignored then.
ModuleWalk walk_again(const std::vector<torch::nn::Module*>& roots, const ShardRequest& request);

}  // namespace fsdp
