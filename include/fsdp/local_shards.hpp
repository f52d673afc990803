#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/fully_shard.hpp"

namespace fsdp {

/// One tensor for all parameters of a group with one dtype, one requires_grad and one label: for optimizers and norms that are
/// faster on few large tensors.
struct FSDP_API LocalShard {
  /// 1-D: this rank's parts of the parameters one after another. It shares the parameters' memory. There is padding between and
  /// after the parts. Padding and its gradient are zero, so it adds nothing to a norm, and it stays zero with any optimizer
  /// that does not change zeros whose gradient is zero.
  ///
  /// A leaf with the requires_grad of its parameters. After a backward it has a `.grad`, 1-D, and the parameters' `.grad` are
  /// views of that. Parameters without a gradient have zeros in it.
  at::Tensor shard;
  std::string label;
  std::string module;  ///< the sharded module's name; "" for the root
  struct Part {
    std::string name;      ///< of the parameter
    at::Tensor parameter;  ///< as parameters() gives it
    int64_t offset = 0;    ///< of its first element, in `shard`
    int64_t numel = 0;     ///< elements on this rank
  };
  std::vector<Part> parts;  ///< by offset

  /// Elements without padding.
  int64_t numel() const {
    int64_t count = 0;
    for (const auto& part : parts) count += part.numel;
    return count;
  }
};

/// Returns a parameter's label. Called with the parameter's name from the root and the sharded parameter; has to return the
/// same on all ranks.
using ShardLabel = std::function<std::string(const std::string& name, const at::Tensor& parameter)>;

/// The local shards of all sharded modules in the tree, in depth-first order. An optimizer takes either these or the
/// parameters:
///
///     std::vector<at::Tensor> tensors;
///     for (auto& local : fsdp::local_shards(*model, decays_or_not)) tensors.push_back(local.shard);
///     MyFusedAdamW optimizer(tensors);
///     ...
///     fsdp::clip_grad_norm_(tensors, 1.0);  // the same global norm as of the parameters
///
/// The first call lays the parameters out, without communication; the number and bytes of collectives stay the same. Later
/// calls return the same tensors. Afterwards fsdp::to may still change dtype and device; if a parameter's requires_grad
/// changes, the next step throws StateError. `zero_grad` of the optimizer or of the module, before the next backward, resets
/// the gradients of both. In the flat layout, parameters with one label have to be neighbours.
///
/// Throws UsageError for other labels than in the first call, StateError inside a step.
FSDP_API std::vector<LocalShard> local_shards(const torch::nn::Module& module, const ShardLabel& label = {});

}  // namespace fsdp
