#pragma once

#include <torch/nn/module.h>

#include <memory>

namespace fsdp {

/// Throws StateError if the module's sharded parameters cannot be copied now: see fsdp::clone.
void check_copyable(torch::nn::Module& module);

/// Shards `copy`, of the same structure with plain parameters of the whole sizes (whose values mean nothing), as
/// `module` is sharded, and copies the shards: see fsdp::clone. Throws before anything is sharded.
void shard_like(torch::nn::Module& module, const std::shared_ptr<torch::nn::Module>& copy);

}  // namespace fsdp
