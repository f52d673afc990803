#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>

namespace fsdp {

struct CloneOptions {
  /// Called with the plain copy before it is sharded, to do what LibTorch's clone() cannot: to tie
  /// members again. Ties of Linear, Embedding and EmbeddingBag are made again without it.
  std::function<void(torch::nn::Module& copy)> prepare = {};
};

/// An independent copy of a sharded module, such as the averaged model of EMA: sharded like
/// the original, with groups of its own over the same meshes, and the same values, options, ignored
/// parameters, ties, frozen parameters, buffers and mode. Gradients, hooks and prefetch lists are not copied.
///
/// The module's class copies its structure: it derives from torch::nn::Cloneable (or overrides clone()),
/// which builds a plain copy of full size for a moment, by `reset()`, which may draw random numbers. Values
/// are copied from shard to shard: nothing is communicated, except to make groups where a mesh asks for new ones,
/// and for parameters tied across groups that the copy has to cut in another way first.
/// A module without sharded parameters is cloned by LibTorch. Of tensor-parallel parameters the copy has the local
/// tensors, with what they are a part of.
///
/// Throws UsageError, the original as it was: for a class that has no clone(), a copy of another
/// structure, a tie that the copy lost, or parameters that belong to a sharded module outside of `module`;
/// StateError while full parameters are shown.
std::shared_ptr<torch::nn::Module> clone(torch::nn::Module& module, const CloneOptions& options = {});

/// `Model ema(fsdp::clone(model));`
template <class Impl>
std::shared_ptr<Impl> clone(const torch::nn::ModuleHolder<Impl>& holder,
                            const CloneOptions& options = {}) {
  return std::dynamic_pointer_cast<Impl>(
      fsdp::clone(static_cast<torch::nn::Module&>(*holder.ptr()), options));
}

}  // namespace fsdp
