#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/fully_shard.hpp"

namespace fsdp {

/// One tensor for all parameters of a group that are of one dtype, trainable or frozen together, and that
/// the caller gave one label: for optimizers and norms that do better with few large tensors.
struct LocalShard {
  /// 1-D, this rank's parts of the parameters one after another, in their memory: a write to either is one to
  /// both. Between and behind the parts lies padding: zero, and zero in the gradient, so that it adds
  /// nothing to a norm, and stays zero under any optimizer that leaves zeros with zero gradients alone.
  ///
  /// A leaf that requires a gradient if its parameters do. After a backward its `.grad` is there, 1-D as
  /// well, and the parameters' `.grad` are views of it; parameters without a gradient have zeros in it.
  at::Tensor shard;
  std::string label;
  std::string module;  ///< the sharded module's name; "" for the root
  struct Part {
    std::string name;      ///< of the parameter
    at::Tensor parameter;  ///< as parameters() gives it
    int64_t offset = 0;    ///< of its first element in `shard`
    int64_t numel = 0;     ///< that this rank holds
  };
  std::vector<Part> parts;  ///< by offset

  /// Elements that are parameters', without padding.
  int64_t numel() const {
    int64_t count = 0;
    for (const auto& part : parts) count += part.numel;
    return count;
  }
};

/// By the parameter's name from the root, and the sharded parameter; the same on all ranks.
using ShardLabel = std::function<std::string(const std::string& name, const at::Tensor& parameter)>;

/// The local shards of every sharded module in the tree, in depth-first order. An optimizer takes
/// either these or the parameters:
///
///     std::vector<at::Tensor> tensors;
///     for (auto& local : fsdp::local_shards(*model, decays_or_not)) tensors.push_back(local.shard);
///     MyFusedAdamW optimizer(tensors);
///     ...
///     fsdp::clip_grad_norm_(tensors, 1.0);  // the same global norm as of the parameters
///
/// The first call puts the parameters in order (no communication; collectives keep their number and
/// bytes) and fixes them: dtype and device may still change with fsdp::to, but a requires_grad
/// that is toggled afterwards makes the next step throw StateError by name. Later calls return the same
/// tensors. `zero_grad` of the optimizer, or of the module, before the next backward resets both sides.
/// In the flat layout parameters with one label must follow each other.
///
/// Outside a step. Throws UsageError for other labels than before; StateError inside a step.
std::vector<LocalShard> local_shards(const torch::nn::Module& module, const ShardLabel& label = {});

}  // namespace fsdp
