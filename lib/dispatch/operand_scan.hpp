#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "dispatch/operand_cast.hpp"
#include "dispatch/param_owner.hpp"
#include "dispatch/param_storage.hpp"
#include "dtensor/operator_info.hpp"

namespace fsdp {

class DTensorImpl;

/// One operator's operands, as the fallback finds them on the stack: whose parameters they are, and what is written.
class OperandScan {
 public:
  using Owners = c10::SmallVector<ParamOwner*, 2>;

  /// may_cast: false in backward, whose operands are those of forward.
  OperandScan(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack* stack, bool may_cast)
      : op_(op), info_(info), may_cast_(may_cast && info.declared_writes == 0 && info.stands_for_unsharded) {
    const size_t count = op.schema().arguments().size();
    arguments_ = {stack->data() + (stack->size() - count), count};
  }

  /// Finds keyed operands; puts unsharded parameters in the place of sharded parameters where due.
  void examine() {
    for (size_t i = 0; i < arguments_.size(); ++i) examine(arguments_[i], i);
  }

  /// Returns the owners of the unsharded parameters among the operands, each once.
  const Owners& owners() const { return owners_; }
  bool has_stand_ins() const { return has_stand_ins_; }
  bool has_dtensors() const { return has_dtensors_; }
  /// An optimizer that was made before fully_shard steps: what it makes for a parameter takes the parameter's form, and what it
  /// writes is the parameter, not what was gathered of it, maybe in a smaller dtype.
  bool means_pieces(int64_t task) const;
  /// Unsharded parameters whose operator is not recorded become DTensors, with which the operator can run on pieces.
  struct Replaced {
    c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> pairs;  ///< DTensor, what it stands for
    bool leaves_unsharded = false;                                 ///< such as a view of a part
  };
  Replaced use_dtensors();
  /// Results that are operands are as the caller knows them.
  void restore(const Replaced& replaced, torch::jit::Stack* stack) const;
  bool touches_all_ready(int64_t task) const {
    return std::ranges::all_of(owners_, [task](auto* owner) { return owner->is_ready(task); });
  }
  void follow_modes(int64_t task) const {
    for (auto* owner : owners_)
      if (owner->follows_mode() && !owner->is_ready(task)) owner->follow_mode();
  }
  bool records_autograd() const;
  const std::string& first_param_name() const { return owners_[0]->param_name(first_index_); }

  /// Floating-point operands beside a parameter come in its dtype: see OperandCast.
  void cast_operands() { cast_.cast_operands(arguments_, info_.statistics); }
  void cast_results(torch::jit::Stack* stack) const { cast_.cast_results(stack, op_.schema().returns().size()); }
  /// Tells owners which of their parameters the operator has written. Call it after the operator.
  void carry_writes();

 private:
  void examine(c10::IValue& value, size_t argument);
  void examine_constant(const c10::IValue& element, size_t argument);
  void examine_list(c10::IValue& value, size_t argument);
  void examine_dtensor(c10::IValue& value, const DTensorImpl& dtensor, size_t argument);
  void examine_tensor(c10::IValue& value, const c10::TensorImpl* impl, size_t argument);
  at::Tensor unsharded_in_place_of(ParamOwner& owner, size_t index) const;
  bool stands_for_unsharded(const ParamOwner& owner) const;
  bool is_written(size_t argument) const { return info_.declares_write_of(argument); }
  void refuse_write(const ParamOwner& owner, size_t index) const;
  void check_write(const ParamStorage& storage, const c10::IValue& value) const;
  void note_write(ParamStorage* storage) {
    written_.push_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  const bool may_cast_;
  std::span<c10::IValue> arguments_;
  Owners owners_;
  size_t first_index_ = 0;
  bool has_stand_ins_ = false, has_dtensors_ = false;
  OperandCast cast_;
  c10::SmallVector<c10::intrusive_ptr<c10::StorageImpl>, 1> written_;
};

}  // namespace fsdp
