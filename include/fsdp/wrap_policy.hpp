#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fully_shard.hpp"

namespace fsdp {

/// A module that a policy is asked about.
struct WrapCandidate {
  torch::nn::Module& module;
  std::string name;       ///< path from the root, such as "blocks.3"
  int64_t numel = 0;      ///< elements of its parameters, without those of modules already chosen below it
  bool is_root = false;
};

/// Which modules of a tree become units of their own: FSDP1's wrap policies for `fully_shard`.
/// The root is always one.
struct WrapPolicy {
  /// Whether to look below a module. `numel`: of all its parameters. None: always.
  std::function<bool(const WrapCandidate& candidate)> enters = {};
  /// The options for a module that is to be a unit, asked after everything below it has been; none:
  /// it stays with its parent. `defaults` are those given to plan_wrapping.
  std::function<std::optional<FullyShardOptions>(const WrapCandidate& candidate,
                                                 const FullyShardOptions& defaults)>
      wraps = {};
};

/// Modules for which `predicate` is true.
WrapPolicy wrap_if(std::function<bool(const WrapCandidate& candidate)> predicate);

/// Modules of these classes, such as wrap_class<torch::nn::TransformerEncoderLayerImpl>().
template <class... Impls>
WrapPolicy wrap_class() {
  return wrap_if([](const WrapCandidate& candidate) {
    return (... || (dynamic_cast<const Impls*>(&candidate.module) != nullptr));
  });
}

struct WrapBySizeOptions {
  /// A unit has at least this many elements that no unit below it has taken.
  int64_t min_numel = 100'000'000;
  /// Not looked into, though it may be a unit. Default: MultiheadAttention.
  std::function<bool(const torch::nn::Module&)> is_leaf = {};
  /// Never a unit. Default: ModuleList and ModuleDict.
  std::function<bool(const torch::nn::Module&)> is_excluded = {};
};
/// FSDP1's size_based_auto_wrap_policy.
WrapPolicy wrap_by_size(const WrapBySizeOptions& options = {});

/// One unit that `apply_wrapping` will make.
struct PlannedUnit {
  torch::nn::Module* module = nullptr;
  std::string name;  ///< "" for the root
  FullyShardOptions options;
  std::vector<std::string> parameters;  ///< by their name from the root
  int64_t bytes = 0;                    ///< of these, unsharded
  int64_t frozen_bytes = 0;             ///< of those that need no gradient
  std::vector<std::string> frozen_parameters;  ///< their names, which `parameters` has too
};

/// What a policy makes of a tree, before anything is changed.
struct WrapPlan {
  std::vector<PlannedUnit> units;  ///< inner before outer; the root last

  /// The tree of units with the bytes of their own parameters, and a note for each unit that mixes
  /// frozen and trainable ones, with both lists.
  std::string to_string() const;
};

/// The dry run. `options` are the root's, and the policy's defaults. No communication.
/// Throws UsageError if the tree has a sharded module already (the first is named), if a policy
/// chooses a container that has no forward. A parameter that several units share is listed with the nearest one
/// around them.
WrapPlan plan_wrapping(torch::nn::Module& root, const WrapPolicy& policy,
                       const FullyShardOptions& options = {});

/// Calls fully_shard for each unit of the plan, inner ones first. Returns the root's controls.
FSDPModule apply_wrapping(const WrapPlan& plan);

/// Both in one.
FSDPModule fully_shard(torch::nn::Module& root, const WrapPolicy& policy,
                       const FullyShardOptions& options = {});

template <class Impl>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Impl>& holder, const WrapPolicy& policy,
                       const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder.ptr()), policy, options);
}

}  // namespace fsdp
