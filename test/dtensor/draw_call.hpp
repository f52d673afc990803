#pragma once

#include <torch/torch.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "support/draw.hpp"

namespace fsdp::test {

/// An operator with operands, ordinary tensors among them.
struct DrawnCall {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  uint64_t generator_seed = 0;  ///< of an operator that draws random numbers
};

/// "add" of aten::add, aten::add_ and aten::add.out.
std::string base_name(const c10::OperatorHandle& op);
bool is_public(const std::string& base_name);
/// All operators of aten:: that take tensors, without those of named dimensions, by base name.
std::vector<c10::OperatorHandle> operators_with_tensors();
bool is_random(const c10::OperatorHandle& op);
/// The argument through which it takes its random numbers, if it has one.
std::optional<size_t> generator_argument(const c10::OperatorHandle& op);
bool is_written(const c10::OperatorHandle& op, size_t argument);

/// Draws by schema: whatever types and names of arguments suggest, or the hint says. May well be what the operator refuses.
DrawnCall draw_call(Draw& draw, const c10::OperatorHandle& op);
at::Tensor draw_values(Draw& draw, c10::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace fsdp::test
