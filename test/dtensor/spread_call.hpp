#pragma once

#include <memory>

#include "draw_call.hpp"
#include "fsdp/dtensor.hpp"

namespace fsdp::test {

/// One tensor among a call's operands: a view of a base, perhaps, that is spread over the mesh.
struct Operand {
  enum class View { kNone, kTranspose, kNarrow, kSelect, kReshape };
  at::Tensor base;  ///< whole
  View view = View::kNone;
  int64_t dim = 0;               ///< of the view
  std::vector<int64_t> sizes = {};  ///< of the view
  bool is_dtensor = false;
  std::vector<Placement> placements = {};  ///< of the base
  std::optional<size_t> same_as = {};      ///< an earlier operand: the same tensor

  at::Tensor viewed(const at::Tensor& base) const;
  std::string text() const;
};

/// A drawn call, which of its tensors are DTensors, and what the plain operator does.
struct SpreadCall {
  DrawnCall drawn;
  std::vector<Operand> operands;  ///< one for each tensor, in order
  std::vector<int64_t> mesh_shape;
  uint64_t seed = 0;

  bool is_unusable = false;  ///< what the plain operator gives hangs on how operands lie in memory
  bool refuses = false;  ///< the plain operator does
  std::string refusal = {};
  std::vector<c10::IValue> results = {};      ///< copies, made before `written_through`
  std::vector<at::Tensor> bases = {};         ///< of the operands, afterwards
  std::vector<int> result_is = {};            ///< the operand that a result is, or -1
  /// Bases once more, after what the view that the operator returned was filled; empty: it returned none.
  std::vector<at::Tensor> bases_written_through = {};

  std::string text() const;
};

/// Draws views and placements for `drawn`, and runs the plain operator on copies.
SpreadCall spread(Draw& draw, DrawnCall drawn, const std::vector<int64_t>& mesh_shape);

/// The arguments of the call with other tensors in the place of its own, and a generator of its own.
std::vector<c10::IValue> with_tensors(const SpreadCall& call, const std::vector<at::Tensor>& tensors);
torch::jit::Stack run_operator(const SpreadCall& call, std::vector<c10::IValue> arguments);
/// Tensors among results, in order.
std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& values);

/// Equal in kind, sizes, dtype and values, but for rounding; else what differs. Undefined equals undefined.
std::optional<std::string> difference(const c10::IValue& actual, const c10::IValue& expected, bool compares_values);
std::optional<std::string> difference(const at::Tensor& actual, const at::Tensor& expected, bool compares_values);

}  // namespace fsdp::test
