#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch/kernels/unboxed_kernel.hpp"
#include "dispatch/param_storage.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "dtensor/rules/operator_family.hpp"

// Note [Unboxed kernels], for pointwise operators on DTensors; the question is whether all operands are placed alike, so that the
// operator runs on their pieces. There autograd and the version counter's layer have nothing to do: nothing records, pieces have
// no history, and what is written counts here.
namespace fsdp {

/// One operator's operands: of one on lists, those of a position go together.
class PieceScan {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (!has_residency_key(impl)) {
      fits_ &= impl->dim() == 0;  // a scalar; what has elements is cut by the fallback
    } else if (is_list_) {
      fits_ = false;  // one that stands beside lists
    } else if (const auto* dtensor = piece(impl)) {
      if (leaders_.empty())
        leaders_.push_back(dtensor);
      else
        fits_ &= dtensor->spec().is_placed_as(leaders_[0]->spec());
    }
  }
  void add(at::TensorList tensors) {
    is_list_ = true;
    const bool leads = leaders_.empty();
    for (size_t i = 0; i < tensors.size() && fits_; ++i) {
      const auto* impl = tensors[i].unsafeGetTensorImpl();
      if (!has_residency_key(impl)) {
        fits_ &= !leads && tensors[i].defined() && impl->dim() == 0;
      } else if (const auto* dtensor = piece(impl)) {
        if (leads)
          leaders_.push_back(dtensor);
        else
          fits_ = i < leaders_.size() && dtensor->spec().is_placed_as(leaders_[i]->spec());
      }
    }
  }
  void add(const std::optional<at::Tensor>& tensor) {
    if (tensor) add(*tensor);
  }
  template <class Other>
  void add(const Other&) {}

  bool fits() const { return fits_ && !leaders_.empty(); }
  const DTensorSpec::Ptr& spec(size_t position) const { return leaders_[position]->value().spec; }

 private:
  /// A parameter in a scope of its root, where operators see the unsharded one.
  static bool is_shown_whole(const DTensorImpl& dtensor) {
    const auto* local = dtensor.local().unsafeGetTensorImpl();
    if (!has_residency_key(local)) return false;
    const auto* storage = ParamStorage::of(local);
    return storage != nullptr && storage->owner() != nullptr && storage->owner()->is_in_scope();
  }

  const DTensorImpl* piece(const c10::TensorImpl* impl) {
    const auto* dtensor = typeid(*impl) == typeid(DTensorImpl) ? static_cast<const DTensorImpl*>(impl) : nullptr;
    const bool is_usable = dtensor != nullptr && dtensor->has_piece() &&
                           !(dtensor->requires_grad() && at::GradMode::is_enabled()) && !is_shown_whole(*dtensor);
    fits_ &= is_usable;
    return is_usable ? dtensor : nullptr;
  }

  c10::SmallVector<const DTensorImpl*, 1> leaders_;
  bool fits_ = true, is_list_ = false;
};

/// An argument with pieces in the place of DTensors.
template <class Argument>
struct PieceArgument {
  explicit PieceArgument(Argument argument) : argument(std::forward<Argument>(argument)) {}
  Argument get() { return std::forward<Argument>(argument); }
  void note_write() const {}
  Argument argument;
};
inline const at::Tensor& piece_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return has_residency_key(impl) ? static_cast<const DTensorImpl*>(impl)->local() : tensor;
}
/// The piece has been written: versions, and a group whose parameter it is.
inline void note_piece_write(const at::Tensor& tensor) {
  const auto& local = piece_of(tensor);
  auto* impl = local.unsafeGetTensorImpl();
  impl->bump_version();
  if (!has_residency_key(impl)) return;
  if (auto* storage = ParamStorage::of(impl); storage != nullptr && storage->owner() != nullptr)
    storage->owner()->note_write(storage->index());
}
template <>
struct PieceArgument<const at::Tensor&> {
  explicit PieceArgument(const at::Tensor& tensor) : tensor(tensor) {}
  const at::Tensor& get() { return piece_of(tensor); }
  void note_write() const { note_piece_write(tensor); }
  const at::Tensor& tensor;
};
template <>
struct PieceArgument<at::Tensor&> {
  explicit PieceArgument(at::Tensor& tensor) : tensor(tensor) {}
  at::Tensor& get() { return const_cast<at::Tensor&>(piece_of(tensor)); }
  void note_write() const { note_piece_write(tensor); }
  at::Tensor& tensor;
};
template <>
struct PieceArgument<at::TensorList> {
  explicit PieceArgument(at::TensorList tensors) : tensors(tensors) {
    for (const auto& tensor : tensors) pieces.push_back(piece_of(tensor));
  }
  at::TensorList get() { return pieces; }
  void note_write() const {
    for (const auto& tensor : tensors) note_piece_write(tensor);
  }
  at::TensorList tensors;
  std::vector<at::Tensor> pieces;
};

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
    std::tuple<PieceArgument<Args>...> pieces{PieceArgument<Args>(std::forward<Args>(args))...};
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
            return std::get<0>(pieces).tensor;
          } else {
            return wrap(Op::redispatch(below, piece.get()...), scan);
          }
        },
        pieces);
  }

 private:
  static uint64_t writes() {
    static const uint64_t writes = form_of(c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name)).writes;
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
