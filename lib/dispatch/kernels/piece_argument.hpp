#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "dispatch/param_storage.hpp"
#include "dtensor/dtensor_impl.hpp"

namespace fsdp {

/// An argument with pieces in the place of DTensors.
template <class Argument>
class PieceArgument {
 public:
  explicit PieceArgument(Argument argument) : argument_(std::forward<Argument>(argument)) {}
  Argument get() { return std::forward<Argument>(argument_); }
  void note_write() const {}

 private:
  Argument argument_;
};
inline const at::Tensor& piece_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return has_residency_key(impl) ? static_cast<const DTensorImpl*>(impl)->local() : tensor;
}
/// The piece has been written: versions, and a group whose parameter it is.
inline void note_piece_write(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();  // its piece's, unless it is `data()` of another
  auto* impl = piece_of(tensor).unsafeGetTensorImpl();
  if (!has_residency_key(impl)) return;
  if (auto* storage = ParamStorage::of(impl); storage != nullptr && storage->owner() != nullptr)
    storage->owner()->note_write(storage->index());
}
template <>
class PieceArgument<const at::Tensor&> {
 public:
  explicit PieceArgument(const at::Tensor& tensor) : tensor_(tensor) {}
  const at::Tensor& get() { return piece_of(tensor_); }
  void note_write() const { note_piece_write(tensor_); }

 private:
  const at::Tensor& tensor_;
};
template <>
class PieceArgument<at::Tensor&> {
 public:
  explicit PieceArgument(at::Tensor& tensor) : tensor_(tensor) {}
  /// Returns what the operator was called with.
  at::Tensor& given() const { return tensor_; }
  at::Tensor& get() { return const_cast<at::Tensor&>(piece_of(tensor_)); }
  void note_write() const { note_piece_write(tensor_); }

 private:
  at::Tensor& tensor_;
};
/// The pieces of a list, borrowed from its tensors: to count references costs as much as all else that is done for a list.
class BorrowedPieces {
 public:
  explicit BorrowedPieces(at::TensorList tensors)
      : count_(tensors.size()), pieces_(std::allocator<at::Tensor>().allocate(count_)) {
    for (size_t i = 0; i < count_; ++i)
      new (pieces_ + i) at::Tensor(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(piece_of(tensors[i])));
  }
  ~BorrowedPieces() { std::allocator<at::Tensor>().deallocate(pieces_, count_); }  // they end without giving a reference back
  BorrowedPieces(const BorrowedPieces&) = delete;
  BorrowedPieces& operator=(const BorrowedPieces&) = delete;
  at::TensorList list() const { return {pieces_, count_}; }

 private:
  size_t count_;
  at::Tensor* pieces_;
};
template <>
class PieceArgument<at::TensorList> {
 public:
  explicit PieceArgument(at::TensorList tensors) : tensors_(tensors), pieces_(tensors) {}
  at::TensorList get() { return pieces_.list(); }
  void note_write() const {
    for (const auto& tensor : tensors_) note_piece_write(tensor);
  }

 private:
  at::TensorList tensors_;
  BorrowedPieces pieces_;
};

}  // namespace fsdp
