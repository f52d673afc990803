#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/fully_shard.hpp"
#include "fsdp/wrap_policy.hpp"

namespace fsdp {

// Arguments of FullyShardedDataParallel (FSDP1), for programs that come from it. docs/coming-from/fsdp1.md says what each
// becomes, and why.

enum class ShardingStrategy { kFullShard, kShardGradOp, kNoShard, kHybridShard, kHybridShardZero2 };
enum class BackwardPrefetch { kNone, kPre, kPost };

/// FSDP1's arguments that have another name in FullyShardOptions, with FSDP1's defaults.
struct FSDP_API Fsdp1Options {
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  /// Default: a mesh over the process's default world, of the dimensions that the strategy needs.
  DeviceMesh mesh = {};
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;
  bool forward_prefetch = false;
  bool limit_all_gathers = true;
  bool sync_module_states = false;
  std::function<void(torch::nn::Module&)> param_init_fn = {};
  std::optional<c10::Device> device_id = {};
  bool use_orig_params = false;
  bool cpu_offload = false;  ///< CPUOffload(offload_params=True)
};

/// FSDP1's arguments as libfsdp's: `options` for every call of fully_shard, and settings of the root.
struct FSDP_API Fsdp1Translation {
  FullyShardOptions options = {};
  int prefetch_distance = 1;
  bool unshard_in_backward = true;
  std::function<void(torch::nn::Module&)> param_init_fn = {};

  /// Call it before the first fully_shard. Calls param_init_fn for each module with parameters or buffers on the meta device,
  /// outer modules first, without `options.ignored_modules` and all below them. No communication. Throws UsageError with the
  /// names of what is on meta afterwards.
  void before(torch::nn::Module& root) const;
  /// Call it after the last fully_shard: makes the settings of the root. No communication.
  void after(FSDPModule root) const;
};

/// Translates the arguments. A collective call if the strategy is hybrid and no mesh is given. Throws UsageError if the mesh's
/// dimensions do not fit the strategy, or if device_id is not its device.
FSDP_API Fsdp1Translation from_fsdp1(const Fsdp1Options& options);

/// FSDP1's constructor: translates, plans with `auto_wrap_policy`, and shards. `more` may change the translated options before
/// they are used, for arguments that have the same name in both (mp_policy, ignored_modules...). Collective calls and errors
/// are those of from_fsdp1 and fully_shard.
FSDP_API FSDPModule fully_shard_fsdp1(torch::nn::Module& root, const WrapPolicy& auto_wrap_policy,
                                      const Fsdp1Options& options,
                                      const std::function<void(FullyShardOptions&)>& more = {});

template <class Impl>
FSDPModule fully_shard_fsdp1(const torch::nn::ModuleHolder<Impl>& root,
                             const WrapPolicy& auto_wrap_policy, const Fsdp1Options& options,
                             const std::function<void(FullyShardOptions&)>& more = {}) {
  return fully_shard_fsdp1(static_cast<torch::nn::Module&>(*root.ptr()), auto_wrap_policy, options,
                           more);
}

}  // namespace fsdp
