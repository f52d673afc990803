#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

namespace fsdp {

/// True for BatchNorm1d, 2d and 3d.
bool is_batch_norm(const torch::nn::Module& module);

/// In which dtypes a group computes and communicates. The sharded parameters, and with them
/// the optimizer's state, keep the dtype that the parameters had. Unlike autocast, parameters are
/// cast once, when they are gathered, and activations are saved for backward in the low precision.
///
/// Only floating-point parameters and operands are cast.
struct MixedPrecisionPolicy {
  /// The dtype that parameters are gathered and computed in, and that their unsharded parameters have from
  /// `fully_shard` on. None: their own.
  std::optional<at::ScalarType> param_dtype = {};
  /// The dtype that gradients are reduced in, and added up in while reduction is disabled. None: the
  /// one they are computed in. Sums in float16 are divided in two parts, before and after.
  ///
  /// A gradient that autograd makes in another dtype than its parameter is computed in (a bfloat16 weight beside a float32
  /// activation) is rounded to that dtype only where it is reduced in it, or in a smaller one.
  ///
  /// A parameter's `grad_dtype` (`set_grad_dtype`, before fully_shard or on either side after it, from the next step on)
  /// goes with it: its reduced gradients have that dtype, or with std::nullopt the one that they were reduced in, also
  /// after `fsdp::to`. Where reduce_dtype is not set they are reduced in it, or as autograd makes them, which is then to
  /// be the same dtype on all ranks.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// The dtype of a module's floating-point outputs at a boundary (`fsdp::call`). None: as they are.
  std::optional<at::ScalarType> output_dtype = {};
  /// The dtype of floating-point buffers. None: their own.
  std::optional<at::ScalarType> buffer_dtype = {};
  /// Cast inputs to param_dtype: at a module boundary (`fsdp::call`) all of a module's floating-point
  /// inputs, and at an operator that uses a parameter its other floating-point operands.
  bool cast_forward_inputs = true;
  /// Leave reduced gradients in the reduce dtype instead of the parameter's own.
  bool keep_low_precision_grads = false;
  /// param_dtype and buffer_dtype are for training only: while the module that fully_shard was called
  /// on is in eval mode (`is_training()` false; of several in one group, all of them), its parameters
  /// are gathered and computed in their own dtype, its buffers have theirs, and nothing is cast to
  /// param_dtype. output_dtype stays. (FSDP1's FSDP_USE_FULL_PREC_IN_EVAL.)
  ///
  /// The mode counts as it is when a step, a scope or a read begins; unsharded parameters have another dtype from
  /// then on. A use in a forward under way whose mode has changed throws StateError; a backward runs in
  /// the dtypes of its forward, and autograd refuses one over a graph retained from before a switch, as
  /// after any write to the parameters. The same mode on all ranks. Needs modules that a shared_ptr owns.
  bool full_precision_in_eval = false;
  /// Another param_dtype for one parameter, by its name in the module and the parameter itself; must
  /// say the same on all ranks. None: the default.
  std::function<std::optional<at::ScalarType>(const std::string& name, const at::Tensor& parameter)>
      param_dtype_override = {};
  /// Modules whose own parameters keep their dtype: the operators that use them get their inputs in
  /// it and give their outputs back in param_dtype. They stay in the group they belong to. By default
  /// BatchNorm, whose statistics LibTorch's kernels want in the dtype of its weight.
  std::function<bool(const torch::nn::Module& module)> is_exempt = &is_batch_norm;
};

/// Shards, gradients, and with them the optimizer's state, live in the host's memory: registered
/// parameters and their `.grad` are CPU tensors, the optimizer runs on the CPU.
///
/// A gather first copies this rank's shard to the mesh's device, and reduced gradients are copied back:
/// complete when backward returns (with set_is_last_backward(false) or manual finalization: when the step
/// ends). Gradients of backwards without reduction stay on the device. On a
/// mesh of CPUs nothing is copied and nothing changes.
struct CPUOffloadPolicy {
  /// Pin the memory, so that the copies run beside the computation. Only where the mesh's device is a GPU.
  bool pin_memory = true;
};
/// nullopt: they live on the mesh's device.
using OffloadPolicy = std::optional<CPUOffloadPolicy>;

}  // namespace fsdp
