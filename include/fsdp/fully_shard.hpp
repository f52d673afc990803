#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/fsdp_module.hpp"
#include "fsdp/fully_shard_options.hpp"

namespace fsdp {

/// Shards the parameters of `module`, except those that sharded submodules have: shard inner modules first. They form one
/// group, which is gathered and reduced together (if a placement function names several meshes, one group for each).
///
/// The module is changed in place and not wrapped. Its members keep the full shape, and `parameters()` returns the sharded
/// parameters. Functions in `options` are kept: fsdp::clone calls them again.
///
/// What is registered below it later, or put in another's place, is sharded when the next forward begins, in a group more, with
/// the same options: all ranks register the same. A tensor that was made of a parameter before and shows its memory (a view, an
/// alias) cannot be read on several ranks from then on: c10::Error, naming the parameter.
///
/// A collective call only if groups of ranks have to be made, with `sync_from_rank0`, and if a tied parameter belongs to
/// another group that shards it otherwise.
///
/// Throws UsageError, with nothing changed and the name of the module or parameter, if it cannot be sharded as requested.
FSDP_API FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

/// Shards several modules, whose parameters form one group.
FSDP_API FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                                const FullyShardOptions& options = {});

/// Shards the module in a holder such as torch::nn::Linear.
template <class Impl>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Impl>& holder,
                       const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder.ptr()), options);
}

/// The handle of a module that `fully_shard` was called on; nullopt for any other module.
FSDP_API std::optional<FSDPModule> find_fsdp_module(const torch::nn::Module& module);

/// Bytes of parameters on this rank, of a root and all groups below it.
struct FSDP_API ParameterBytes {
  int64_t sharded = 0;         ///< local shards, with padding
  int64_t unsharded = 0;       ///< gathered, or being gathered
  int64_t peak_unsharded = 0;  ///< the most of these at one time since fully_shard
  int64_t kept = 0;  ///< buffers of released groups, with `set_keep_unsharded_storage`
  /// Buffers of `set_symm_mem_for_comm`, also for packed gradients; unsharded groups may lie in them. As requested; the device
  /// allocates multiples of 2 MiB.
  int64_t symmetric = 0;
};
FSDP_API ParameterBytes parameter_bytes(const FSDPModule& root);

/// Lets several roots share the memory of their communication, such as the pipeline stages of one rank:
/// `set_reduce_scatter_max_input_buffers` then limits the packed gradients of all of them together. Streams need no sharing, as
/// collectives run on the process group's.
///
/// All roots belong to one thread. A root that joins another set leaves its own. Call it after all calls of fully_shard, as a
/// root that is sharded as part of a larger module is no longer a root. Throws UsageError, with nothing changed, if a module
/// is not a root. No communication.
FSDP_API void share_comm_ctx(const std::vector<FSDPModule>& roots);

/// The sharded modules that no other sharded module in the tree contains.
FSDP_API std::vector<FSDPModule> roots(const torch::nn::Module& module);

}  // namespace fsdp
