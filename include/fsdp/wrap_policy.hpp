#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/fully_shard.hpp"

namespace fsdp {

/// A module for which a policy decides.
struct FSDP_API WrapCandidate {
  torch::nn::Module& module;
  std::string name;       ///< path from the root, such as "blocks.3"
  int64_t numel = 0;      ///< elements of its parameters, without those of units below it
  bool is_root = false;
};

/// Which modules of a tree become units, each with its own call of `fully_shard`: FSDP1's wrap policies. The root is always a
/// unit. A policy is not asked about ignored modules and those below them. What a policy of mixed precision exempts
/// (MixedPrecisionPolicy::is_exempt) is a unit in any case if it has parameters.
struct FSDP_API WrapPolicy {
  /// Whether to look for units below a module; `numel` counts all its parameters then. Default: always.
  std::function<bool(const WrapCandidate& candidate)> enters = {};
  /// The options of a module that becomes a unit; nullopt: its parameters go to its parent's unit. Called for the modules below
  /// first. `defaults` are the options given to plan_wrapping.
  std::function<std::optional<FullyShardOptions>(const WrapCandidate& candidate,
                                                 const FullyShardOptions& defaults)>
      wraps = {};
};

/// Makes units of the modules for which `predicate` is true.
FSDP_API WrapPolicy wrap_if(std::function<bool(const WrapCandidate& candidate)> predicate);

/// Makes units of the modules of these classes, such as wrap_class<torch::nn::TransformerEncoderLayerImpl>().
template <class... Impls>
WrapPolicy wrap_class() {
  return wrap_if([](const WrapCandidate& candidate) {
    return (... || (dynamic_cast<const Impls*>(&candidate.module) != nullptr));
  });
}

struct FSDP_API WrapBySizeOptions {
  /// The least number of elements of a unit, without those of units below it.
  int64_t min_numel = 100'000'000;
  /// Modules that stay with their parent as a whole: neither they nor those below them are units. Default: MultiheadAttention.
  std::function<bool(const torch::nn::Module&)> is_leaf = {};
  /// Modules that are never units, but looked into. Containers without a forward (ModuleList, ParameterDict...) never are.
  std::function<bool(const torch::nn::Module&)> is_excluded = {};
};
/// FSDP1's size_based_auto_wrap_policy.
FSDP_API WrapPolicy wrap_by_size(const WrapBySizeOptions& options = {});

/// One unit that `apply_wrapping` will make.
struct FSDP_API PlannedUnit {
  torch::nn::Module* module = nullptr;
  std::string name;  ///< "" for the root
  FullyShardOptions options;
  std::vector<std::string> parameters;  ///< names from the root
  int64_t bytes = 0;                    ///< of these parameters, unsharded
  int64_t frozen_bytes = 0;             ///< of those among them that need no gradient
  std::vector<std::string> frozen_parameters;  ///< the names of those
  bool is_exempt = false;  ///< MixedPrecisionPolicy::is_exempt holds for it, or for a module around it
};

/// The units that a policy chose in a tree. Nothing is sharded yet.
struct FSDP_API WrapPlan {
  std::vector<PlannedUnit> units;  ///< inner before outer; the root last

  /// The tree of units with the bytes of their parameters. A unit that mixes frozen and trainable parameters has a note that
  /// lists both.
  std::string to_string() const;
};

/// Chooses the units and changes nothing. `options` are those of the root, and the policy's defaults; of `ignored_modules` each
/// unit has those in it. A parameter that several units share is listed with the nearest unit that contains them. No
/// communication.
///
/// Throws UsageError if the tree has a sharded module already, which the error names, if the policy chooses a container
/// without a forward, or if an ignored module is the root or not in the tree.
FSDP_API WrapPlan plan_wrapping(torch::nn::Module& root, const WrapPolicy& policy,
                                const FullyShardOptions& options = {});

/// Calls fully_shard for each unit of the plan, inner ones first. Returns the root's handle. Warns of a plan of the root alone.
FSDP_API FSDPModule apply_wrapping(const WrapPlan& plan);

/// plan_wrapping and apply_wrapping in one call.
FSDP_API FSDPModule fully_shard(torch::nn::Module& root, const WrapPolicy& policy,
                                const FullyShardOptions& options = {});

template <class Impl>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Impl>& holder, const WrapPolicy& policy,
                       const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder.ptr()), policy, options);
}

}  // namespace fsdp
