#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/initializer.hpp"
#include "fsdp/meta_device.hpp"

namespace fsdp {

struct InitOptions {
  /// The same seed, module and names give the same values.
  uint64_t seed = 0;
  /// For classes of the program's own, or other rules for LibTorch's: the first that fits a module
  /// is taken. Then those for LibTorch's own classes, which follow their reset_parameters().
  std::vector<ModuleInitializer> initializers = {};
};

/// Gives a module on the meta device (fsdp::MetaDevice) memory and first values: of what is
/// sharded, this rank's part only, on the mesh's device; the rest as a whole.
///
///     auto model = [&] { fsdp::MetaDevice meta; return Llama(config); }();
///     for (auto& block : *model->blocks) fsdp::fully_shard(*block, {.mesh = mesh});
///     fsdp::fully_shard(*model, {.mesh = mesh});
///     fsdp::materialize(*model, {.seed = 1});
///
/// Modules get their values innermost first, so that an outer class may overrule
/// (MultiheadAttention, Transformer). The values do not depend on the number of ranks or the layout, and those of
/// tensor-parallel parameters are the plain module's; the module need not be sharded at all. What is not on meta
/// keeps its values. Sharded parameters stay the same tensors, so an optimizer that was built before is as good
/// as one built afterwards.
///
/// Nothing is communicated; all ranks make the same call. Extra memory: one parameter, this rank's
/// part or, for orthogonal_, sparse_ and whole_, the whole. Throws UsageError, with nothing
/// changed, that lists every module with a parameter or buffer that no initialiser covers, or for a
/// part of a group.
void materialize(torch::nn::Module& module, const InitOptions& options = {});

/// The memory alone: what is on meta becomes zeros. For values that come from elsewhere (a
/// checkpoint). device: of what is not sharded; none: the mesh's, or the CPU if nothing is sharded.
void to_empty(torch::nn::Module& module, std::optional<c10::Device> device = {});

/// The values alone: every parameter, and the buffers that an initialiser covers, get first values
/// again. Throws UsageError, with nothing changed, for parameters that none covers or that are on
/// meta.
void init_parameters(torch::nn::Module& module, const InitOptions& options = {});

/// The same for a holder such as torch::nn::Linear.
template <class Impl>
void materialize(const torch::nn::ModuleHolder<Impl>& holder, const InitOptions& options = {}) {
  materialize(static_cast<torch::nn::Module&>(*holder.ptr()), options);
}
template <class Impl>
void to_empty(const torch::nn::ModuleHolder<Impl>& holder, std::optional<c10::Device> device = {}) {
  to_empty(static_cast<torch::nn::Module&>(*holder.ptr()), device);
}
template <class Impl>
void init_parameters(const torch::nn::ModuleHolder<Impl>& holder, const InitOptions& options = {}) {
  init_parameters(static_cast<torch::nn::Module&>(*holder.ptr()), options);
}

}  // namespace fsdp
