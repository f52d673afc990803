#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

namespace fsdp {

/// What the fallback needs to know of an operator, read off its schema once.
struct OperatorTraits {
  /// Implemented by LibTorch: nothing below it can touch another group's unsharded parameter.
  bool is_aten = false;
  /// Returns what autograd records: then a sharded parameter stands for its unsharded parameter. Not so for
  /// detach, comparisons, `zeros_like` and kin, nor where no tensor is returned.
  bool is_differentiable = false;
  /// `clone`.
  bool is_clone = false;
  /// Changes sizes, strides or storage of a tensor in place.
  bool changes_metadata = false;
  /// Only looks at or rearranges sizes and strides (`view`, `t`, `detach`...): needs no data.
  bool is_view = false;
  /// Made of other operators and often a view (`reshape`, `contiguous`): those decide.
  bool is_transparent = false;
  /// Bit i: argument i is written to.
  uint64_t writes = 0;
  /// Bit i: argument i keeps its dtype where the others are cast: statistics that a normalisation
  /// updates in place.
  uint64_t statistics = 0;
};

/// Cached per operator; about 20 instructions when cached. Thread-safe.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace fsdp
