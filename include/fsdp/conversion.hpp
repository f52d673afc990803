#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <optional>

namespace fsdp {

/// Converts a module with sharded parameters: unsharded parameters, shards, gradients (those that wait for
/// a reduction too) and buffers together, and with them the parameters in it that are not sharded.
/// Use it instead of `module->to(...)`, which would leave a member and its sharded parameter in
/// different dtypes: it throws StateError, naming the parameter (then `reset_iter_state()` on the root
/// and this function make good what it did). Where nothing is to be converted, it does nothing.
///
/// Every tensor that somebody holds (a member, an entry of `parameters()`, what an optimizer knows)
/// goes on as the same tensor, requires_grad and ties included. What an optimizer keeps for itself
/// is not touched, as in PyTorch: momenta keep their dtype, which LibTorch's optimizers accept;
/// after a change of device, make the optimizer's state again.
///
/// dtype: a floating-point one, of the floating-point parameters and buffers; others keep theirs. A
///   `param_dtype` and a `buffer_dtype` of the mixed-precision policy stay: then the dtype that is
///   kept (and saved) is what changes.
/// device: the mesh's; the CPU, to park the parameters there; or meta, to give up the values.
///   Where CPUOffloadPolicy keeps parameters and gradients on the CPU, they stay; unsharded parameters and buffers move.
///
/// `module` holds whole groups: the module that fully_shard was called on, or one around it.
/// No communication, but all ranks make the same call. Needs memory for one group beside what is
/// there; each group changes as a whole or not at all.
/// Throws UsageError (nothing has changed) for a part of a group, for another device or dtype, and
/// for parameters on the meta device, which have no values to move; StateError inside a step or a
/// scope.
void to(torch::nn::Module& module, c10::Device device);
void to(torch::nn::Module& module, at::ScalarType dtype);
void to(torch::nn::Module& module, c10::Device device, at::ScalarType dtype);

/// The dtype that a buffer of `module` is saved in: its own, where the mixed-precision policy keeps
/// it in another (buffer_dtype), else the one it has.
at::ScalarType saved_dtype(const torch::nn::Module& module, const at::Tensor& buffer);

// Module.cpu(), cuda(), half(), bfloat16(), float() and double() in Python.
inline void to_cpu(torch::nn::Module& module) { to(module, at::kCPU); }
inline void to_half(torch::nn::Module& module) { to(module, at::kHalf); }
inline void to_bfloat16(torch::nn::Module& module) { to(module, at::kBFloat16); }
inline void to_float(torch::nn::Module& module) { to(module, at::kFloat); }
inline void to_double(torch::nn::Module& module) { to(module, at::kDouble); }
/// index: none: the mesh's, or the current one.
void to_cuda(torch::nn::Module& module, std::optional<c10::DeviceIndex> index = {});

/// The same for a holder such as torch::nn::Linear.
template <class Impl, class... Target>
void to(const torch::nn::ModuleHolder<Impl>& holder, Target... target) {
  to(static_cast<torch::nn::Module&>(*holder.ptr()), target...);
}

}  // namespace fsdp
