#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/initializer.hpp"
#include "fsdp/meta_device.hpp"

namespace fsdp {

struct FSDP_API InitOptions {
  /// Seeds the random values: the same seed, module and names give the same values.
  uint64_t seed = 0;
  /// Rules for the program's own classes, or other rules for LibTorch's. The first that fits a module is used, before the
  /// built-in rules for LibTorch's classes, which do what their reset_parameters() does.
  std::vector<ModuleInitializer> initializers = {};
};

/// Gives a module on the meta device (fsdp::MetaDevice) memory and initial values. Sharded parameters get this rank's part, on
/// the mesh's device; other tensors are whole.
///
///     auto model = [&] { fsdp::MetaDevice meta; return Llama(config); }();
///     for (auto& block : *model->blocks) fsdp::fully_shard(*block, {.mesh = mesh});
///     fsdp::fully_shard(*model, {.mesh = mesh});
///     fsdp::materialize(*model, {.seed = 1});
///
/// Inner modules get their values first, so that an outer class (MultiheadAttention, Transformer) may overwrite them. The
/// values depend neither on the number of ranks nor on the layout, and are the same as for a module that is not sharded; also
/// for tensor-parallel parameters. Tensors that are not on meta keep their values. Sharded parameters stay the same tensors,
/// so an optimizer may be built before or after.
///
/// No communication, but all ranks make the same call. Extra memory: this rank's part of one parameter; for orthogonal_,
/// sparse_ and whole_, one whole parameter. Throws UsageError, with nothing changed, for parameters or buffers that no
/// initializer covers, all of which it lists, and for a part of a group. What an initializer of the program throws arrives as a
/// UsageError that names its module, with the other exception nested in it, or as LibTorch's own exception with the name added.
FSDP_API void materialize(torch::nn::Module& module, const InitOptions& options = {});

/// Gives memory only: tensors on meta become zeros, for values that are loaded afterwards. device: where tensors that are not
/// sharded go; default: the mesh's, or the CPU if nothing is sharded.
FSDP_API void to_empty(torch::nn::Module& module, std::optional<c10::Device> device = {});

/// Gives values only: all parameters, and the buffers that an initializer covers, get initial values again. Throws UsageError,
/// with nothing changed, for parameters that no initializer covers or that are on meta.
FSDP_API void init_parameters(torch::nn::Module& module, const InitOptions& options = {});

/// These overloads take a holder such as torch::nn::Linear and do the same with its module.
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
