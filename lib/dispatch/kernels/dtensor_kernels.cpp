#include <ATen/ops/_foreach_add_ops.h>
#include <ATen/ops/_foreach_addcmul_ops.h>
#include <ATen/ops/_foreach_div_ops.h>
#include <ATen/ops/_foreach_lerp_ops.h>
#include <ATen/ops/_foreach_mul_ops.h>
#include <ATen/ops/_foreach_sqrt_ops.h>
#include <ATen/ops/_foreach_zero_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/zero_ops.h>

#include "dispatch/kernels/piece_kernel.hpp"

// What optimizers and clipping do with DTensors, beside the operators that have kernels for other reasons, too.
namespace fsdp {

namespace {

template <class Op, class Signature>
struct DTensorKernel;

template <class Op, class Result, class... Args>
struct DTensorKernel<Op, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    using Pieces = PieceKernel<Op, Result(Args...)>;
    if (PieceScan scan; Pieces::fits(scan, args...)) [[likely]]
      return Pieces::run(keys, scan, std::forward<Args>(args)...);
    return call_residency_fallback<Op, Result, Args...>(keys, std::forward<Args>(args)...);
  }
};

template <class... Ops>
void add_piece_kernels(torch::Library& library) {
  (add_residency_kernel<Ops, DTensorKernel<Ops, typename Ops::schema>>(library), ...);
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  using namespace at::_ops;
  add_piece_kernels<add__Scalar, mul__Scalar, sub__Scalar, div__Scalar, div__Tensor, addcmul_, lerp__Scalar, zero_,
                    fill__Scalar>(library);
  add_piece_kernels<add_Scalar, mul_Scalar, sub_Tensor, div_Scalar, div_Tensor, at::_ops::sqrt, at::_ops::abs, at::_ops::neg>(
      library);
  add_piece_kernels<_foreach_mul_Scalar, _foreach_add_Scalar, _foreach_sqrt, _foreach_div_ScalarList, _foreach_div_List>(
      library);
  add_piece_kernels<_foreach_add__Scalar, _foreach_add__ScalarList, _foreach_addcmul__Scalar, _foreach_lerp__Scalar,
                    _foreach_div__Scalar, _foreach_div__ScalarList, _foreach_mul__Tensor, _foreach_zero_>(library);
}

}  // namespace

}  // namespace fsdp
