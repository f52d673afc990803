#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>

namespace fsdp {

struct OwnAccumulator;

/// Note [Stand-ins]
/// A tensor of another kind, Python's DTensor, that shows a sharded parameter outside forward. It computes with its
/// own kind alone, and an operator whose operands are all of that kind passes on to it unchanged: optimizers, norms,
/// state dicts. Where an operator has ordinary tensors beside it, which that kind refuses, the unsharded parameter takes
/// its place, so that any function may read the parameter. What is computed from stand-ins alone, such as a
/// view, is a stand-in in turn: the operator is repeated on the unsharded parameters when its result meets an ordinary
/// tensor, or where the kind cannot run it. Tensors of the kind that are not stand-ins (gradients, optimizer state)
/// have nothing in whose place they stand, so operators on them pass on, too.
///
/// It travels with its tensor as LibTorch's backend metadata, and the tensor carries the residency key.
class StandIn : public c10::BackendMeta {
 public:
  /// Returns the ordinary tensor whose place it takes; undefined: none (any more), and the operator is the kind's to refuse.
  virtual at::Tensor ordinary() = 0;
  /// Returns a number that moves with every write to what `ordinary` is made of; 0 where that is not told.
  virtual int64_t version() const = 0;
  /// True if what it is made of has a parameter without dimensions. The kind would take scalars beside it, and lose the
  /// reduction of its gradient over the ranks.
  virtual bool is_of_scalar() const = 0;
  /// Returns the ordinary parameter, where the tensor is a parameter itself: autograd's leaf, to which gradients of ordinary
  /// tensors belong. Undefined: it is none (any more). Gathers nothing.
  virtual at::Tensor leaf() { return {}; }
  /// Notes that an operator of the kind has written to the tensor.
  virtual void note_write() = 0;
  /// Notes a write by way of `.data`, which autograd does not see.
  virtual void note_data_write() = 0;
  /// True if other floating-point operands are to come in its ordinary tensor's dtype.
  virtual bool casts_operands() const = 0;
  /// True if the kind could not run the operator, as far as this error of it tells (not an interrupt, say).
  virtual bool is_refusal(const std::exception& error) const = 0;

  /// True for the tensor that it was made for alone: metadata is copied along with keys.
  bool is_of(const c10::TensorImpl* tensor) const { return tensor_ == tensor; }
  /// Returns the tensor's own accumulator, while autograd knows a fork in its place: see Note [Gradients of stand-ins]. Null:
  /// there has been no fork.
  std::shared_ptr<OwnAccumulator>& own_accumulator() { return own_accumulator_; }
  void set_tensor(const c10::TensorImpl* tensor) { tensor_ = tensor; }

 private:
  const c10::TensorImpl* tensor_ = nullptr;  // only compared
  std::shared_ptr<OwnAccumulator> own_accumulator_;
};

void make_stand_in(const at::Tensor& tensor, c10::intrusive_ptr<StandIn> stand_in);
/// Returns the stand-in that a tensor has; null for any other tensor.
c10::intrusive_ptr<StandIn> stand_in_of(const at::Tensor& tensor);

}  // namespace fsdp
