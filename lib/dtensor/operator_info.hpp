#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>

namespace fsdp {

/// Names the rule by which an operator on DTensors is run (propagate.hpp).
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

/// The positions of arguments that have these names; -1: there is none.
struct NamedArguments {
  int8_t dim = -1;  ///< or dims
  int8_t keepdim = -1, dtype = -1, memory_format = -1;
};

/// What the library needs to know of an operator, read off its schema and its name once.
struct OperatorInfo {
  Family family = Family::kGeneral;
  /// Implemented by LibTorch: nothing below it can touch another group's unsharded parameter.
  bool is_aten = false;
  bool is_clone = false;
  bool changes_metadata = false;  ///< sizes, strides or storage of a tensor, in place
  /// Only looks at or rearranges sizes and strides (`view`, `t`, `detach`...): needs no data.
  bool is_view = false;
  /// Made of other operators and often a view (`reshape`, `contiguous`): those decide.
  bool is_transparent = false;
  /// Returns what autograd records: then a sharded parameter stands for its unsharded parameter. Not so for detach,
  /// comparisons, `zeros_like` and kin, nor where no tensor is returned.
  bool stands_for_unsharded = false;
  /// Autograd may record it: on a DTensor that needs a gradient it runs on the whole.
  bool records_whole = false;
  NamedArguments arguments = {};
  /// Bit i: argument i is written to, as the schema says. The last bit stands for all arguments from it on.
  uint64_t declared_writes = 0;
  uint64_t writes = 0;  ///< those, and what batch norms write without saying so
  /// Bit i: argument i keeps its dtype where the others are cast: statistics that a normalisation updates in place.
  uint64_t statistics = 0;

  bool declares_write_of(size_t argument) const { return bit(declared_writes, argument); }
  bool is_written(size_t argument) const { return bit(writes, argument); }

 private:
  static bool bit(uint64_t bits, size_t argument) { return (bits >> (argument < 63 ? argument : 63) & 1) != 0; }
};

/// Cached per operator; about 20 instructions when cached. Thread-safe.
const OperatorInfo& info_of(const c10::OperatorHandle& op);

}  // namespace fsdp
