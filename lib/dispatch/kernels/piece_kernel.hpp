#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch/kernels/piece_argument.hpp"
#include "dispatch/kernels/piece_scan.hpp"
#include "dispatch/kernels/unboxed_kernel.hpp"
#include "dtensor/operator_info.hpp"

// Note [Unboxed kernels], for pointwise operators on DTensors; the question is whether all operands are placed alike, so that
// the operator runs on their pieces. There autograd and the version counter's layer have nothing to do: nothing records, pieces
// have no history, and what is written counts here.
namespace fsdp {

template <class Op, class Signature>
struct PieceKernel;

template <class Op, class Result, class... Args>
struct PieceKernel<Op, Result(Args...)> {
  static bool fits(PieceScan& scan, const std::remove_reference_t<Args>&... args) {
    (scan.add(args), ...);
    return scan.fits() && writes_dtensors(args...);
  }

  /// Result is what a caller gets of an operator that writes: the operand as the caller knows it.
  static Result run(c10::DispatchKeySet keys, const PieceScan& scan, Args... args) {
    std::tuple<PieceArgument<Args>...> pieces(std::forward<Args>(args)...);
    return std::apply(
        [&](auto&... piece) -> Result {
          const auto note_writes = [&] {
            size_t i = 0;
            ((writes() >> i++ & 1 ? piece.note_write() : void()), ...);
          };
          const c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                         c10::DispatchKeySet(kResidencyKey));
          // Modes of the thread stay.
          const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::ADInplaceOrView);
          if constexpr (std::is_void_v<Result>) {
            Op::redispatch(below, piece.get()...);
            note_writes();
          } else if constexpr (std::is_reference_v<Result>) {
            Op::redispatch(below, piece.get()...);
            note_writes();
            return std::get<0>(pieces).given();
          } else {
            return wrap(Op::redispatch(below, piece.get()...), scan);
          }
        },
        pieces);
  }

 private:
  static uint64_t writes() {
    static const uint64_t writes = info_of(c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name)).writes;
    return writes;
  }
  /// An ordinary tensor that is written is the whole on every rank.
  static bool writes_dtensors(const std::remove_reference_t<Args>&... args) {
    const auto fits = [](const auto& argument) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, at::Tensor>)
        return has_residency_key(argument.unsafeGetTensorImpl());
      else
        return true;
    };
    size_t i = 0;
    return ((!(writes() >> i++ & 1) || fits(args)) && ...);
  }

  static at::Tensor wrap(at::Tensor result, const PieceScan& scan) { return make_dtensor(std::move(result), scan.spec(0)); }
  static std::vector<at::Tensor> wrap(std::vector<at::Tensor> results, const PieceScan& scan) {
    for (size_t i = 0; i < results.size(); ++i) results[i] = make_dtensor(std::move(results[i]), scan.spec(i));
    return results;
  }
};

}  // namespace fsdp
