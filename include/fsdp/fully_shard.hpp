#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/fsdp_module.hpp"
#include "fsdp/fully_shard_options.hpp"

namespace fsdp {

/// Shards the parameters of `module` that no sharded submodule has taken yet, as one group that is gathered
/// and reduced together (one for each mesh, where a placement function names several). The module itself is not
/// wrapped or changed: its members keep the full shape; `parameters()` holds this rank's rows from now on. Shard
/// inner modules first. A collective call only where groups have to be made, with `sync_from_rank0`, and where a
/// tied parameter comes from a group that is cut in another way. Functions among the options stay with the module:
/// fsdp::clone asks them again.
///
/// Throws UsageError, with nothing changed, and naming the module or parameter, for all that cannot be sharded as asked.
FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

/// The same for several modules that share one group.
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options = {});

/// The same for a holder such as torch::nn::Linear.
template <class Impl>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Impl>& holder,
                       const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder.ptr()), options);
}

/// The controls of a module that `fully_shard` was called on; nullopt for any other module.
std::optional<FSDPModule> find_fsdp_module(const torch::nn::Module& module);

/// Bytes of parameters on this rank, of a root and all groups below it.
struct ParameterBytes {
  int64_t sharded = 0;         ///< local shards, with padding
  int64_t unsharded = 0;       ///< gathered now, or being gathered
  int64_t peak_unsharded = 0;  ///< most gathered at one time since fully_shard
  int64_t kept = 0;  ///< buffers of released groups, with `set_keep_unsharded_storage`
  /// Buffers of `set_symm_mem_for_comm`, for packed gradients too; groups that are unsharded lie in them. As they were
  /// asked for: the device gives out multiples of 2 MiB.
  int64_t symmetric = 0;
};
ParameterBytes parameter_bytes(const FSDPModule& root);

/// Lets several roots share their communication's memory (the stages of a pipeline on one rank):
/// `set_reduce_scatter_max_input_buffers` then counts the packed gradients of all of them together, so that
/// one root's reductions that nobody has waited for do not lie beside another one's. Streams need no
/// sharing: collectives run on the process group's. All of them belong to one thread. A root that
/// joins another set leaves its own; one that is sharded as a part of a larger module is a root no more, so
/// this comes after all calls of fully_shard.
/// Throws UsageError if a module is not a root, with nothing changed. No communication.
void share_comm_ctx(const std::vector<FSDPModule>& roots);

/// The sharded modules that no other sharded module in the tree contains.
std::vector<FSDPModule> roots(const torch::nn::Module& module);

}  // namespace fsdp
