#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <optional>

#include "fsdp/api.hpp"

namespace fsdp {

/// Converts a sharded module to another dtype or device: sharded and unsharded parameters, gradients, buffers, and the
/// parameters in it that are not sharded. Does nothing if nothing has to be converted.
///
/// Use it in place of `module->to(...)`, which cannot convert sharded parameters and throws StateError. After such an error,
/// call `reset_iter_state()` on the root and then this function.
///
/// Tensors that others hold (members, entries of `parameters()`, the optimizer's parameters) stay the same tensors, with
/// requires_grad and ties. The optimizer's own state is not converted, as in PyTorch. LibTorch's optimizers accept momenta of
/// another dtype; after a change of device, make the optimizer's state anew.
///
/// dtype: a floating-point dtype, for floating-point parameters and buffers. `param_dtype` and `buffer_dtype` of the
///   mixed-precision policy still apply: the dtype of sharded parameters and saved buffers changes.
/// device: the mesh's; the CPU, to keep the parameters there for a while; or meta, to drop the values. With CPUOffloadPolicy,
///   shards and gradients stay on the CPU, and unsharded parameters and buffers move.
///
/// `module` is a module that fully_shard was called on, or one that contains it. No communication, but all ranks make the same
/// call. Needs memory for one more group. Each group changes as a whole or not at all.
///
/// Throws UsageError, with nothing changed, for a part of a group, for another device or dtype, and for parameters on the meta
/// device, which have no values to move. Throws StateError inside a step or a scope.
FSDP_API void to(torch::nn::Module& module, c10::Device device);
FSDP_API void to(torch::nn::Module& module, at::ScalarType dtype);
FSDP_API void to(torch::nn::Module& module, c10::Device device, at::ScalarType dtype);

/// The dtype in which a buffer of `module` is saved. It differs from the buffer's dtype only with a buffer_dtype.
FSDP_API at::ScalarType saved_dtype(const torch::nn::Module& module, const at::Tensor& buffer);

// As Module.cpu(), half(), bfloat16(), float(), double() and cuda() in Python.
inline void to_cpu(torch::nn::Module& module) { to(module, at::kCPU); }
inline void to_half(torch::nn::Module& module) { to(module, at::kHalf); }
inline void to_bfloat16(torch::nn::Module& module) { to(module, at::kBFloat16); }
inline void to_float(torch::nn::Module& module) { to(module, at::kFloat); }
inline void to_double(torch::nn::Module& module) { to(module, at::kDouble); }
/// index: default: the mesh's, else the current device.
FSDP_API void to_cuda(torch::nn::Module& module, std::optional<c10::DeviceIndex> index = {});

/// Converts the module in a holder such as torch::nn::Linear.
template <class Impl, class... Target>
void to(const torch::nn::ModuleHolder<Impl>& holder, Target... target) {
  to(static_cast<torch::nn::Module&>(*holder.ptr()), target...);
}

}  // namespace fsdp
