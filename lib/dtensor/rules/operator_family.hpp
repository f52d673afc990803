#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

namespace fsdp {

/// By which rule an operator on DTensors is run; see propagate.hpp.
enum class Family : uint8_t {
  kGeneral,      ///< on whole tensors
  kComposite,    ///< made of other operators, which come here by themselves
  kPointwise,    ///< on pieces
  kAlongDim,     ///< on pieces, where the dimension that it works along is not cut
  kLike,         ///< makes a tensor placed as its operand
  kDrawLike,     ///< the same with random numbers
  kDraw,         ///< writes random numbers
  kNew,          ///< makes a tensor of given sizes
  kReduce,       ///< sum, norm, maximum...
  kDot,
  kForeachNorm,
  kAlias,        ///< detach
  kView,
  kMayTakeData,  ///< asked by set_data
  kKept,         ///< changes nothing that a DTensor has
  kSetData,      ///< set_(Tensor): torch::load
  kRefused,      ///< would change sizes or memory
};

/// What the rules need to know of an operator, read off its schema once.
struct OperatorForm {
  Family family = Family::kGeneral;
  uint64_t writes = 0;       ///< bit i: argument i is written to
  int dim = -1, keepdim = -1, dtype = -1, memory_format = -1;  ///< arguments of these names; -1: none
  bool is_differentiable = false;          ///< autograd may record it
};

/// Cached by thread.
const OperatorForm& form_of(const c10::OperatorHandle& op);

}  // namespace fsdp
