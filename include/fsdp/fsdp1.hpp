#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fully_shard.hpp"
#include "fsdp/wrap_policy.hpp"

namespace fsdp {

// FullyShardedDataParallel's vocabulary (FSDP1), for those who come from it.
//
// | FSDP1's argument     | value               | here, and why                                           |
// |----------------------|---------------------|---------------------------------------------------------|
// | sharding_strategy    | FULL_SHARD          | 1-D mesh, reshard_after_forward unset: released after   |
// |                      |                     | forward, but for the root, which FSDP1 keeps as well    |
// |                      | SHARD_GRAD_OP       | 1-D mesh, reshard_after_forward = false (ZeRO-2)        |
// |                      | NO_SHARD            | 1-D mesh, replicate_only = true (DDP in the same engine)|
// |                      | HYBRID_SHARD        | 2-D mesh (replicate, shard): the one given, else        |
// |                      |                     | hybrid_mesh(): shards within a node                     |
// |                      | _HYBRID_SHARD_ZERO2 | the same with reshard_after_forward = false             |
// | process_group,       | given               | `mesh`; of groups that exist: DeviceMesh::from_group({shard}) |
// | device_mesh          |                     | or DeviceMesh::from_group({shard, replicate})                 |
// | backward_prefetch    | BACKWARD_PRE        | the default: backward gathers one group ahead           |
// |                      | BACKWARD_POST       | set_unshard_in_backward(false): a group is gathered     |
// |                      |                     | once the one before is done with its gradients. Two are |
// |                      |                     | never held, which is what POST is for; it starts its    |
// |                      |                     | gather at that moment too                               |
// |                      | None                | the same: FSDP1's None differs from POST by a moment    |
// | forward_prefetch     | True, False         | nothing: the order is learned and forward gathers one   |
// |                      |                     | group ahead. (False is FSDP1's default because its      |
// |                      |                     | order must not change; here a change is noticed)        |
// | limit_all_gathers    | True                | the default: two groups are unsharded at one time       |
// |                      | False               | prefetch distance 2: one group more. There is no "as    |
// |                      |                     | many as the host can start": ranks could differ         |
// | sync_module_states   | True                | sync_from_rank0 = true                                  |
// | param_init_fn        | a function          | called for every module with parameters or buffers on   |
// |                      |                     | the meta device, before its unit is sharded             |
// | device_id            | a device            | the mesh says the device; another one is refused        |
// | use_orig_params      | True, False         | nothing: parameters() holds the original parameters,    |
// |                      |                     | each this rank's rows of it, under their names. What    |
// |                      |                     | False forbids (frozen beside trainable) is allowed      |
// | auto_wrap_policy     | a policy            | fully_shard(module, policy, options), wrap_policy.hpp   |
// | ignored_modules,     | given               | options.ignored_modules, ignored_params                 |
// | ignored_states       |                     |                                                         |
// | mixed_precision      | given               | options.mp_policy; FSDP1's reduce_dtype defaults to its |
// |                      |                     | param_dtype, as here. FSDP_USE_FULL_PREC_IN_EVAL=1 is   |
// |                      |                     | mp_policy.full_precision_in_eval                        |
// | cpu_offload          | offload_params=True | offload_policy = CPUOffloadPolicy{}: shards, gradients  |
// |                      |                     | and optimizer state on the CPU                          |

enum class ShardingStrategy { kFullShard, kShardGradOp, kNoShard, kHybridShard, kHybridShardZero2 };
enum class BackwardPrefetch { kNone, kPre, kPost };

/// FSDP1's arguments that have another name here, with FSDP1's defaults.
struct Fsdp1Options {
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  /// Undefined: over the process's default world, by the strategy.
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

/// The same said in libfsdp's words: `options` for every call of fully_shard, and what is set on the
/// root when all are made.
struct Fsdp1Translation {
  FullyShardOptions options = {};
  int prefetch_distance = 1;
  bool unshard_in_backward = true;
  std::function<void(torch::nn::Module&)> param_init_fn = {};

  /// Before the first fully_shard: calls param_init_fn where there is something on the meta device,
  /// outer modules before inner ones. Throws UsageError naming what is on meta afterwards.
  void before(torch::nn::Module& root) const;
  /// After the last one.
  void after(FSDPModule root) const;
};

/// Translates by the table above. Where no mesh is given and the strategy is a hybrid one, a collective call.
/// Throws UsageError if the mesh's dimensions do not fit the strategy, or device_id is not its device.
Fsdp1Translation from_fsdp1(const Fsdp1Options& options);

/// All of it: FSDP1's constructor with auto_wrap_policy. `more`, which changes the translated
/// options, is for what has the same name in both (mp_policy, ignored_modules...).
FSDPModule fully_shard_fsdp1(torch::nn::Module& root, const WrapPolicy& auto_wrap_policy,
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
