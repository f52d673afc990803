#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "dtensor/dtensor_impl.hpp"
#include "dtensor/operator_info.hpp"

namespace fsdp {

/// Calls `visit(tensor, position in its list or -1)` for every defined tensor of an operand; a defined tensor that it returns
/// takes the other's place. Lists are the caller's own, so they are copied first.
template <class Visit>
void replace_tensors(c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return;
    if (at::Tensor other = visit(value.toTensor(), int64_t{-1}); other.defined()) value = std::move(other);
  } else if (value.isList()) {
    std::optional<c10::List<c10::IValue>> copy;
    const auto elements = value.toListRef();
    for (size_t i = 0; i < elements.size(); ++i) {
      if (!elements[i].isTensor() || !elements[i].toTensor().defined()) continue;
      at::Tensor other = visit(elements[i].toTensor(), static_cast<int64_t>(i));
      if (!other.defined()) continue;
      if (!copy) copy = value.toList().copy();
      copy->set(i, std::move(other));
    }
    if (copy) value = std::move(*copy);
  }
}
/// Calls `visit` as replace_tensors does, and replaces nothing.
template <class Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor(), int64_t{-1});
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    for (size_t i = 0; i < elements.size(); ++i)
      if (elements[i].isTensor() && elements[i].toTensor().defined())
        visit(elements[i].toTensor(), static_cast<int64_t>(i));
  }
}

/// One call of an operator that has DTensors among its operands, which are the last values on the stack.
class OperatorCall {
 public:
  using Arguments = std::vector<c10::IValue>;

  OperatorCall(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack)
      : op_(op), below_(below), stack_(stack), info_(info_of(op)), count_(op.schema().arguments().size()) {}

  const c10::OperatorHandle& op() const { return op_; }
  const OperatorInfo& info() const { return info_; }
  /// Returns the operator's name without "aten::".
  std::string_view name() const;
  size_t count() const { return count_; }
  std::span<c10::IValue> operands() const { return {stack_->data() + (stack_->size() - count_), count_}; }
  const c10::IValue& operand(size_t i) const { return operands()[i]; }
  /// Returns a copy of the operands, to be changed for `call`.
  Arguments arguments() const { return {operands().begin(), operands().end()}; }
  bool is_written(size_t i) const { return info_.is_written(i); }

  /// Returns how a result is placed if its operand is placed so: laid out as the call's memory format says. Null for a flat
  /// layout if that is another order than the one in which its elements are cut.
  DTensorSpec::Ptr in_format(const DTensorSpec::Ptr& spec) const;

  /// Calls the operator anew, on other operands, and returns whatever it returns. The caller holds them meanwhile: torch 2.11
  /// drops those on its stack before it reads the references to them that the operator returned.
  torch::jit::Stack call(const Arguments& arguments) const;
  /// Calls an operator that returns a tensor, as `call` does.
  at::Tensor call_for_tensor(const Arguments& arguments) const { return call(arguments).back().toTensor(); }
  /// Runs the operator itself, which comes back here with each of its parts.
  void run_parts() const { op_.redispatchBoxed(below_, stack_); }

  /// Gives what was written a new version on this rank too, if it has none of its elements (Note [Ranks without elements]).
  void note_writes_of_nothing() const;

  /// Replaces the operands by what the caller gets.
  void give(c10::IValue result) const;
  /// Replaces the operands by the results of a call on other operands: what was written is what the caller knows, other tensors
  /// become `other(tensor, position)` where that is defined.
  template <class Other>
  void give_results(torch::jit::Stack results, const Other& other) const {
    for (size_t i = 0; i < results.size(); ++i)
      if (!restore_written(i, results[i])) replace_tensors(results[i], other);
    finish(std::move(results));
  }

 private:
  /// Replaces result `i` by the operand that the caller knows, if it is one that was written. False: it is none.
  bool restore_written(size_t i, c10::IValue& result) const;
  void finish(torch::jit::Stack results) const;

  const c10::OperatorHandle& op_;
  const c10::DispatchKeySet below_;
  torch::jit::Stack* stack_;
  const OperatorInfo& info_;
  const size_t count_;
};

}  // namespace fsdp
