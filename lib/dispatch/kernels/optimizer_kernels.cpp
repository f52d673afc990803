#include <ATen/ops/_foreach_add_ops.h>
#include <ATen/ops/_foreach_addcdiv_ops.h>
#include <ATen/ops/_foreach_mul_ops.h>
#include <ATen/ops/_foreach_sub_ops.h>
#include <ATen/ops/_fused_adagrad_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/sub_ops.h>

#include "dispatch/kernels/piece_kernel.hpp"
#include "dispatch/kernels/unboxed_kernel.hpp"
#include "dispatch/param_storage.hpp"
#include "dispatch/stand_in/stand_in.hpp"

// Note [Unboxed kernels], for what optimizers write to parameters: to DTensors, or to what stand-ins show. Of those the
// question is whether the operator is one that passes on to their own kind unchanged (Note [Stand-ins]).
namespace fsdp {

namespace {

/// One operator's operands.
class Scan {
 public:
  void add_written(const at::Tensor& tensor) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->key_set().has(c10::DispatchKey::Python)) {
      is_known_ = false;
    } else if (!has_residency_key(impl)) {
      has_own_kind_ = true;
    } else if (auto stand_in = stand_in_of(tensor)) {
      written_.push_back(std::move(stand_in));
    } else {
      is_known_ = false;
    }
  }
  void add_written(at::TensorList tensors) {
    for (const auto& tensor : tensors) add_written(tensor);
  }

  void add_read(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto* impl = tensor.unsafeGetTensorImpl();
    const auto keys = impl->key_set();
    is_known_ &= !keys.has(kResidencyKey);
    if (keys.has(c10::DispatchKey::Python))
      has_own_kind_ = true;
    else if (!impl->is_wrapped_number() && impl->dim() > 0)
      has_ordinary_ = true;
  }
  void add_read(at::TensorList tensors) {
    for (const auto& tensor : tensors) add_read(tensor);
  }
  void add_read(const std::optional<at::Tensor>& tensor) {
    if (tensor) add_read(*tensor);
  }
  template <class Other>
  void add_read(const Other&) {}

  bool passes_on() const { return is_known_ && (has_own_kind_ || !has_ordinary_); }
  void note_writes() const {
    for (const auto& stand_in : written_) stand_in->note_write();
  }

 private:
  c10::SmallVector<c10::intrusive_ptr<StandIn>, 4> written_;
  bool is_known_ = true, has_own_kind_ = false, has_ordinary_ = false;
};

template <class Op, class Signature>
struct WriteKernel;

/// The first operand is written to. The others may be, too: what they are is no stand-in then, or the fallback's.
template <class Op, class Result, class Written, class... Args>
struct WriteKernel<Op, Result(Written, Args...)> {
  static Result call(c10::DispatchKeySet keys, Written written, Args... args) {
    using Pieces = PieceKernel<Op, Result(Written, Args...)>;
    if (PieceScan pieces; Pieces::fits(pieces, written, args...)) [[likely]]
      return Pieces::run(keys, pieces, std::forward<Written>(written), std::forward<Args>(args)...);
    Scan scan;
    scan.add_written(written);
    (scan.add_read(args), ...);
    if (!scan.passes_on())
      return call_residency_fallback<Op, Result, Written, Args...>(keys, std::forward<Written>(written),
                                                                   std::forward<Args>(args)...);
    const auto below = below_residency(keys);
    if constexpr (std::is_void_v<Result>) {
      Op::redispatch(below, std::forward<Written>(written), std::forward<Args>(args)...);
      scan.note_writes();
    } else {
      Result result = Op::redispatch(below, std::forward<Written>(written), std::forward<Args>(args)...);
      scan.note_writes();
      return result;
    }
  }
};

template <class... Ops>
void add_all(torch::Library& library) {
  (add_residency_kernel<Ops, WriteKernel<Ops, typename Ops::schema>>(library), ...);
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  using namespace at::_ops;
  add_all<add__Tensor, sub__Tensor, mul__Tensor, addcdiv_>(library);
  add_all<_foreach_add__List, _foreach_sub__List, _foreach_mul__Scalar, _foreach_mul__ScalarList>(library);
  add_all<_foreach_addcdiv__Scalar, _foreach_addcdiv__ScalarList, _foreach_addcdiv__Tensor>(library);
  add_all<_fused_adam_, _fused_adam__tensor_lr, _fused_adamw_, _fused_adamw__tensor_lr, _fused_sgd_,
          _fused_sgd__tensor_lr, _fused_adagrad_>(library);
}

}  // namespace

}  // namespace fsdp
