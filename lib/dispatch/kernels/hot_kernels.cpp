#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/view_ops.h>
#include <torch/csrc/autograd/graph_task.h>

#include "dispatch/kernels/piece_kernel.hpp"
#include "dispatch/kernels/unboxed_kernel.hpp"
#include "dispatch/param_storage.hpp"

// Note [Unboxed kernels]; the question is whether the groups of all operands are ready.
namespace fsdp {

namespace {

/// kUniformData: data, the operands' dtypes having been compared.
enum class Needs { kData, kUniformData, kMetadata };

bool is_settled(const c10::TensorImpl* impl, Needs needs) {
  if (!has_residency_key(impl)) return true;
  const auto* storage = ParamStorage::of(impl);
  if (storage == nullptr || storage->kind() != ParamStorage::Kind::kUnsharded) return false;
  const auto* owner = storage->owner();
  // What is recorded is recorded with the requires_grad that its unsharded parameter has now.
  const bool may_have_toggled = owner->may_have_toggled() && at::GradMode::is_enabled();
  if (needs == Needs::kMetadata && !owner->follows_mode() && !may_have_toggled) return true;
  const bool may_cast = needs == Needs::kData && owner->casts_operands();
  return !may_cast && !may_have_toggled && owner->is_ready(torch::autograd::get_current_graph_task_id());
}
bool is_settled(const at::Tensor& tensor, Needs needs) {
  return is_settled(tensor.unsafeGetTensorImpl(), needs);
}
bool is_settled(const std::optional<at::Tensor>& tensor, Needs needs) {
  return !tensor || is_settled(*tensor, needs);
}
template <class Other>
bool is_settled(const Other&, Needs) {
  return true;
}

/// Whether all floating-point operands have one dtype, so that a group that casts operands finds
/// nothing to cast.
struct DtypeCheck {
  bool is_uniform = true;
  std::optional<at::ScalarType> dtype;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type())) return;
    is_uniform &= !dtype || *dtype == tensor.scalar_type();
    dtype = tensor.scalar_type();
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (!has_residency_key(impl)) return;
    const auto* storage = ParamStorage::of(impl);
    if (storage != nullptr && storage->owner()->casts_operands())
      is_uniform &= !storage->owner()->output_dtype(storage->index());
  }
  void add(const std::optional<at::Tensor>& tensor) {
    if (tensor) add(*tensor);
  }
  template <class Other>
  void add(const Other&) {}
};

/// Pointwise: of DTensors, the pieces compute.
template <class Op>
constexpr bool takes_pieces = std::is_same_v<Op, at::_ops::add_Tensor> || std::is_same_v<Op, at::_ops::mul_Tensor>;

template <class Op, Needs needs, class Signature>
struct HotKernel;

template <class Op, Needs needs, class Result, class... Args>
struct HotKernel<Op, needs, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    if ((is_settled(args, needs) && ...) || needs_no_cast(args...)) [[likely]] {
      c10::impl::ExcludeDispatchKeyGuard guard(kResidencyKey);
      return Op::redispatch(below_residency(keys), std::forward<Args>(args)...);
    }
    if constexpr (takes_pieces<Op>)
      if (PieceScan pieces; PieceKernel<Op, Result(Args...)>::fits(pieces, args...))
        return PieceKernel<Op, Result(Args...)>::run(keys, pieces, std::forward<Args>(args)...);
    if constexpr (std::is_same_v<Op, at::_ops::detach>)
      if (const auto* dtensor = DTensorImpl::of(args...); dtensor != nullptr && !PieceScan::is_shown_whole(*dtensor)) {
        return at::Tensor(dtensor->shallow_copy_and_detach(dtensor->version_counter(), /*allow_tensor_metadata_change=*/true));
      }
    return call_residency_fallback<Op, Result, Args...>(keys, std::forward<Args>(args)...);
  }

 private:
  static bool needs_no_cast(const std::remove_reference_t<Args>&... args) {
    if (needs == Needs::kMetadata || !(is_settled(args, Needs::kUniformData) && ...)) return false;
    DtypeCheck check;
    (check.add(args), ...);
    return check.is_uniform;
  }
};

template <class Op, Needs needs = Needs::kData>
void add(torch::Library& library) {
  add_residency_kernel<Op, HotKernel<Op, needs, typename Op::schema>>(library);
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  add<at::_ops::linear>(library);
  add<at::_ops::addmm>(library);
  add<at::_ops::mm>(library);
  add<at::_ops::bmm>(library);
  add<at::_ops::matmul>(library);
  add<at::_ops::add_Tensor>(library);
  add<at::_ops::mul_Tensor>(library);
  add<at::_ops::layer_norm>(library);
  add<at::_ops::native_layer_norm_backward>(library);
  add<at::_ops::embedding>(library);
  add<at::_ops::t, Needs::kMetadata>(library);
  add<at::_ops::transpose_int, Needs::kMetadata>(library);
  add<at::_ops::view, Needs::kMetadata>(library);
  add<at::_ops::detach, Needs::kMetadata>(library);
}

}  // namespace

}  // namespace fsdp
