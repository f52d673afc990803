#pragma once

#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <span>

#include "dispatch/param_owner.hpp"

namespace fsdp {

/// Casts a floating-point tensor, recorded by autograd like a cast that the user wrote; gives any other back as it is.
at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype);

/// Mixed precision of one operator: its other floating-point operands come in the dtype of the first unsharded parameter
/// that wants it so.
class OperandCast {
 public:
  /// Other parameters stay as they are. like: parameter `index` of `owner`, which wants the others to be as it is; on the stack
  /// until the operator has run.
  void offer(const ParamOwner& owner, size_t index, const at::Tensor& like);
  /// Other parameters are cast, too: for operands whose operator has yet to be called. The first dtype counts.
  void cast_to(at::ScalarType dtype) {
    if (!to_) to_ = dtype;
  }
  /// statistics: by argument, those that stay as they are.
  void cast_operands(std::span<c10::IValue> arguments, uint64_t statistics);
  /// What the operator has left on the stack, in the dtype that the parameter's module is to give.
  void cast_results(torch::jit::Stack* stack, size_t results) const;

 private:
  bool is_due(const c10::IValue& value) const;
  void cast(c10::IValue& value) const;

  std::optional<at::ScalarType> to_, output_dtype_;  // to_: none while nothing is cast
  const c10::TensorImpl* like_ = nullptr;            // null: none was offered
  const ParamOwner* owner_ = nullptr;
  size_t index_ = 0;
};

}  // namespace fsdp
