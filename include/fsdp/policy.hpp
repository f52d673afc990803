#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

#include "fsdp/api.hpp"

namespace fsdp {

/// True for BatchNorm1d, 2d and 3d.
FSDP_API bool is_batch_norm(const torch::nn::Module& module);

/// The dtypes in which a group computes and communicates. Sharded parameters, and so the optimizer's state, keep the dtype that
/// the parameters had. Unlike with autocast, a parameter is cast once, when it is gathered, and activations are saved for
/// backward in the low precision. Only floating-point tensors are cast.
struct FSDP_API MixedPrecisionPolicy {
  /// The dtype in which parameters are gathered and computed. Unsharded parameters have it from `fully_shard` on. Default: the
  /// parameter's own.
  std::optional<at::ScalarType> param_dtype = {};
  /// The dtype in which gradients are reduced, and added up while reduction is disabled. Default: the dtype in which they are
  /// computed. With float16, one part of the division comes before the sum and one after it, against overflow.
  ///
  /// Autograd may give a gradient in another dtype than its parameter's: a bfloat16 weight beside a float32 activation. The
  /// gradient is then rounded only if it is reduced in a smaller dtype than it has.
  ///
  /// A parameter's `grad_dtype` (`set_grad_dtype`) is respected. It may be set before or after fully_shard, on the sharded or
  /// the unsharded parameter, and counts from the next step on. Reduced gradients have that dtype; with std::nullopt, the
  /// dtype in which they were reduced. Without a reduce_dtype, gradients are also reduced in `grad_dtype`; with
  /// std::nullopt, in the dtype that autograd gives them, which then has to be the same on all ranks.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// The dtype to which `fsdp::call` casts a module's floating-point outputs. Default: not cast.
  std::optional<at::ScalarType> output_dtype = {};
  /// The dtype of floating-point buffers, but of exempt modules. Default: their own.
  std::optional<at::ScalarType> buffer_dtype = {};
  /// Casts inputs to param_dtype: in `fsdp::call` all floating-point inputs of the module, and in an operator that uses a
  /// parameter the other floating-point operands.
  bool cast_forward_inputs = true;
  /// Reduced gradients stay in the reduce dtype and are not cast to the parameter's own.
  bool keep_low_precision_grads = false;
  /// True: param_dtype and buffer_dtype apply to training only. FSDP_USE_FULL_PREC_IN_EVAL=1 in the environment, FSDP1's, sets
  /// it in every policy. While the module is in
  /// eval mode (`is_training()` is false; of several modules in one group, for all of them), parameters are gathered and
  /// computed in their own dtype, buffers have theirs, and inputs are not cast. output_dtype applies in both modes.
  ///
  /// The mode is read when a step, a scope or a read begins, and has to be the same on all ranks. If it changes during a
  /// forward, the next use of a parameter throws StateError. A backward runs in the dtypes of its forward. After a change,
  /// autograd refuses the backward of a retained graph, as after any write to the parameters. Needs modules that are owned
  /// by a shared_ptr.
  bool full_precision_in_eval = false;
  /// Another param_dtype for single parameters. Called with the parameter's name in the module and the parameter; has to return
  /// the same on all ranks. nullopt: param_dtype.
  std::function<std::optional<at::ScalarType>(const std::string& name, const at::Tensor& parameter)>
      param_dtype_override = {};
  /// Modules that compute in full precision, with all below them but for sharded modules: their parameters keep their dtype,
  /// within the same group. Operators that use these parameters get their inputs in that dtype, and their outputs are cast to
  /// param_dtype. What such a module computes without a parameter of its own, as an RMSNorm its mean, is in the dtype of its
  /// input. An exempt module that is sharded by itself, as by a wrap policy, has a group of its own as FSDP1 makes one, and
  /// `fsdp::call` of it casts at its boundary alone. Default: BatchNorm, as LibTorch's kernels need its statistics in the dtype
  /// of its weight.
  std::function<bool(const torch::nn::Module& module)> is_exempt = &is_batch_norm;
};

/// Shards and gradients live in the host's memory: registered parameters and their `.grad` are CPU tensors, and the optimizer
/// runs on the CPU.
///
/// Before an all-gather this rank's shard is copied to the mesh's device; reduced gradients are copied back. The copies are
/// complete when backward returns, or, with set_is_last_backward(false) or manual finalization, when the step ends.
/// Gradients of backwards without reduction stay on the device. On a mesh of CPUs this changes nothing.
struct FSDP_API CPUOffloadPolicy {
  /// Pins the memory, so that copies overlap with compute. For GPUs only.
  bool pin_memory = true;
};
/// nullopt: shards and gradients live on the mesh's device.
using OffloadPolicy = std::optional<CPUOffloadPolicy>;

}  // namespace fsdp
