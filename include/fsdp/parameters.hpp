#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/dtensor.hpp"

namespace fsdp {

/// The sharded parameter of an unsharded one, which a module's member holds. A sharded parameter is returned as it is. Throws
/// UsageError for any other tensor.
FSDP_API at::Tensor sharded(const at::Tensor& parameter);

/// The unsharded parameter, which the module's member holds, of a sharded one. An unsharded parameter is returned as it is.
FSDP_API at::Tensor unsharded(const at::Tensor& parameter);

/// What `parameters()` gives for a tensor that a module's member holds. Any other tensor is returned as it is, so that a
/// program means the same with and without fully_shard: `p.is_same(fsdp::registered(head->weight))`, or
/// `fsdp::registered(head->weight).unsafeGetTensorImpl()` as the key of a set or of an optimizer's state. Of a sharded module a
/// member is another tensor than its entry in `parameters()`, and LibTorch compares addresses without asking anybody.
FSDP_API at::Tensor registered(const at::Tensor& tensor);

/// True for a parameter of a sharded module, sharded or unsharded.
FSDP_API bool is_fsdp_parameter(const at::Tensor& tensor);

/// The DTensor of a parameter, given sharded or unsharded. It shares the sharded parameter's memory and has the whole tensor's
/// sizes. Its mesh is the data-parallel one; for a tensor-parallel parameter, (dp, tp). Throws UsageError for a parameter in
/// the flat layout, which no placement describes: use full_tensor and local_ranges.
FSDP_API DTensor dtensor_of(const at::Tensor& parameter);

/// The DTensor of its gradient; undefined if the parameter has no gradient.
FSDP_API DTensor grad_dtensor_of(const at::Tensor& parameter);

/// The whole parameter on every rank, in its original dtype, with its sizes and strides, on the sharded parameter's device: on
/// the host if that is offloaded. For any layout, outside autograd. On one rank it may share the parameter's memory. A
/// collective call over the shard group and the tensor-parallel ranks.
FSDP_API at::Tensor full_tensor(const at::Tensor& parameter);
/// Returns the whole gradient of a parameter, as full_tensor does the parameter; undefined if there is none. Either all ranks
/// have a gradient or none has.
FSDP_API at::Tensor full_grad(const at::Tensor& parameter);

/// Replaces the parameters of an optimizer that was built before `fully_shard` by the sharded ones. Its state comes along:
/// tensors of a parameter's full size are cut to this rank's part. Returns the number of replaced parameters.
FSDP_API int adopt(torch::optim::Optimizer& optimizer);

/// Clips the gradients of `parameters` by their global norm, in place, and returns that norm, which is equal on all ranks.
/// Sharded, replicated and plain parameters may be mixed; what is replicated counts once. A collective call: one all-reduce
/// for each mesh and each tensor-parallel dimension.
///
/// norm_type: any number, or an infinity; 0: how many parameters have gradients. Gradients are multiplied by
/// max_norm / (norm + 1e-6), if that is below 1, as in torch.nn.utils.clip_grad_norm_.
///
/// Throws UsageError if `parameters` contains unsharded parameters, which have no gradients of their own. With
/// `error_if_nonfinite`, throws StateError if the norm is not finite, and leaves the gradients as they are.
FSDP_API double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                                bool error_if_nonfinite = false);

/// Clips as clip_grad_norm_ does, but the norm stays on the device, float64 and without dimensions, and the host does not wait
/// for it.
FSDP_API at::Tensor clip_grad_norm_async_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);

// 0.1's way to say `error_if_nonfinite`.
enum class NonFinite { kAllow, kThrow };
[[deprecated("pass error_if_nonfinite, a bool")]] inline double clip_grad_norm_(const std::vector<at::Tensor>& parameters,
                                                                                double max_norm, double norm_type,
                                                                                NonFinite nonfinite) {
  return clip_grad_norm_(parameters, max_norm, norm_type, nonfinite == NonFinite::kThrow);
}

/// The global norm of the gradients, by the same rules. A collective call.
FSDP_API double get_total_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

}  // namespace fsdp
