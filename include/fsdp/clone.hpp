#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>

#include "fsdp/api.hpp"

namespace fsdp {

struct FSDP_API CloneOptions {
  /// Called with the plain copy before it is sharded, to tie members again, which LibTorch's clone() does not. Ties of Linear,
  /// Embedding and EmbeddingBag are restored without it.
  std::function<void(torch::nn::Module& copy)> prepare = {};
};

/// Returns an independent copy of a sharded module, such as the averaged model of EMA. It is sharded like the original, with
/// its own groups over the same meshes. Values, options, ignored and frozen parameters, ties, buffers and mode are copied;
/// gradients, hooks and prefetch lists are not. A module without sharded parameters is cloned by LibTorch.
///
/// The module's class derives from torch::nn::Cloneable or overrides clone(). That makes a plain copy of full size for a
/// moment; its `reset()` may draw random numbers. Values are then copied from shard to shard. Nothing is communicated, except
/// where a mesh needs new groups, and for parameters that are tied across groups and that the copy first shards otherwise.
///
/// Throws UsageError, with the original unchanged, for a class without clone(), a copy of another structure, a tie that the
/// copy lost, or parameters that belong to a sharded module outside `module`. Throws StateError inside FullParameters.
FSDP_API std::shared_ptr<torch::nn::Module> clone(torch::nn::Module& module, const CloneOptions& options = {});

/// `Model ema(fsdp::clone(model));`
template <class Impl>
std::shared_ptr<Impl> clone(const torch::nn::ModuleHolder<Impl>& holder,
                            const CloneOptions& options = {}) {
  return std::dynamic_pointer_cast<Impl>(
      fsdp::clone(static_cast<torch::nn::Module&>(*holder.ptr()), options));
}

}  // namespace fsdp
