#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/state_dict.hpp"

namespace fsdp {

/// The keys of parameters in an optimizer's state: names ("blocks.0.weight"), or positions in the optimizer's groups, counted
/// through: "0", "1", ...
enum class OptimizerKeys { kName, kPosition };

struct FSDP_API OptimizerStateDictOptions {
  StateDictOptions values = {};
  OptimizerKeys keys = OptimizerKeys::kName;
};

struct FSDP_API OptimizerStateDict {
  /// lr, momentum, ...: double; amsgrad, nesterov, centered: bool; betas: two doubles.
  using Option = std::variant<double, bool, std::vector<double>>;

  struct ParamState {
    std::map<std::string, StateEntry> tensors;  ///< "exp_avg", "momentum_buffer", ...
    std::optional<int64_t> step;                ///< none: this optimizer does not count
  };
  struct Group {
    std::vector<std::string> params;  ///< keys, in the optimizer's order
    std::map<std::string, Option> options;
  };

  StateDictKind kind = StateDictKind::kFull;
  OptimizerKeys keys = OptimizerKeys::kName;
  std::string optimizer;  ///< "AdamW", ...
  /// The state of each parameter, by key. Parameters that have had no step have no entry.
  std::map<std::string, ParamState> state = {};
  std::vector<Group> groups = {};
};

/// The state of LibTorch's AdamW, Adam, SGD, Adagrad or RMSprop over the module's sharded parameters, or a plain module's. A
/// collective call with kFull, which gathers one tensor at a time.
///
/// Throws UsageError for another optimizer, a parameter that is not the module's, or an unsharded parameter (see fsdp::adopt);
/// StateError if the ranks have state for different parameters.
FSDP_API OptimizerStateDict optimizer_state_dict(const torch::nn::Module& module,
                                                 const torch::optim::Optimizer& optimizer,
                                                 const OptimizerStateDictOptions& options = {});

/// Replaces the optimizer's state, step counters and group options by the dict's. Keys may be of either kind; the order of
/// names within a group does not matter. `missing`, `unexpected` and `wrong` are as for load_state_dict. Parameters without
/// state in the dict have none afterwards. A collective call when load_state_dict is one.
FSDP_API IncompatibleKeys load_optimizer_state_dict(const torch::nn::Module& module,
                                     torch::optim::Optimizer& optimizer,
                                     const OptimizerStateDict& dict, const LoadOptions& options = {});

/// Returns the dict with other keys, for an optimizer with the same groups. No communication. Throws UsageError if dict and
/// optimizer do not have the same parameters.
FSDP_API OptimizerStateDict rekey(OptimizerStateDict dict, OptimizerKeys keys, const torch::nn::Module& module,
                                  const torch::optim::Optimizer& optimizer);

}  // namespace fsdp
