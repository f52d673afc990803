#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "fsdp/dtensor.hpp"

namespace fsdp {

/// The sharded parameter (this rank's rows) of what a module's member holds; a sharded
/// parameter is returned as it is. Throws UsageError for any other tensor.
at::Tensor sharded(const at::Tensor& parameter);

/// The unsharded parameter (full shape), which the module's member holds, of a sharded one; an unsharded parameter is
/// returned as it is.
at::Tensor unsharded(const at::Tensor& parameter);

/// True for a parameter of a sharded module, sharded or unsharded.
bool is_fsdp_parameter(const at::Tensor& tensor);

/// A parameter, given sharded or unsharded, as a DTensor that shares the sharded one's memory, on the data-parallel mesh and, if
/// it is tensor-parallel, that one's dimensions behind: (dp, tp), with the whole tensor's sizes. Throws UsageError
/// for one in a flat layout, which is no DTensor's: use full_tensor and local_ranges.
DTensor dtensor_of(const at::Tensor& parameter);

/// The full gradient's DTensor; undefined where the parameter has no gradient.
DTensor grad_dtensor_of(const at::Tensor& parameter);

/// The whole parameter in its original dtype, with its sizes and strides, on every rank, outside
/// autograd; whatever the layout. Outside a step it may be the memory of the parameter itself at one
/// rank. A collective call over its shard group, and the ranks of tensor parallelism.
at::Tensor full_tensor(const at::Tensor& parameter);
/// The same of its gradient; undefined where this rank has none, which must be so on all ranks or none.
at::Tensor full_grad(const at::Tensor& parameter);

/// Moves an optimizer that was built before `fully_shard` over to the sharded parameters, with its state:
/// full-size state tensors are cut to this rank's rows. Returns how many parameters moved.
int adopt(torch::optim::Optimizer& optimizer);

/// Clips the gradients of `parameters` (sharded, replicated and plain ones together) by their
/// global norm and returns that norm, equal on every rank. One all-reduce per mesh and dimension of tensor
/// parallelism, where what is replicated counts once: a collective call.
///
/// norm_type: 1, 2, ..., infinity. Gradients are scaled by max_norm / (norm + 1e-6), at most 1.
/// Throws UsageError if `parameters` holds unsharded parameters, whose gradients live elsewhere;
/// StateError if `error_if_nonfinite` and the norm is not finite (gradients are left as they are).
enum class NonFinite { kAllow, kThrow };
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                       double norm_type = 2.0, NonFinite nonfinite = NonFinite::kAllow);

/// The global norm alone, by the same rules. A collective call.
double get_total_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

}  // namespace fsdp
