#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <vector>

#include "dispatch/stand_in/stand_in.hpp"

namespace fsdp {

/// One operator on stand-ins, to be repeated on what they stand for. Keeps no operand alive but ordinary ones.
class DeferredCall {
 public:
  /// arguments: the operator's, in order.
  DeferredCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

  /// Repeats the operator on what its operands stand for, and returns whatever it returns; empty if an operand stands for
  /// nothing.
  torch::jit::Stack repeat() const;
  /// Returns the sum of the operands' versions.
  int64_t version() const;
  void note_write() const;
  void note_data_write() const;
  bool is_of_scalar() const;
  bool casts_operands() const;
  bool is_refusal(const std::exception& error) const { return operands_.front().stand_in->is_refusal(error); }

 private:
  struct Operand {
    size_t argument;
    std::optional<size_t> element;  // of a list
    c10::intrusive_ptr<StandIn> stand_in;
  };
  c10::OperatorHandle op_;
  torch::jit::Stack arguments_;  // undefined tensors where stand-ins were
  std::vector<Operand> operands_;
  bool had_grad_mode_;
};

/// Makes the results of the call, which are the last ones on the stack, stand-ins.
void make_results_stand_in(const std::shared_ptr<DeferredCall>& call, torch::jit::Stack& stack, size_t results,
                           bool is_view);

}  // namespace fsdp
