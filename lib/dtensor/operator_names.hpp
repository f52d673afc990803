#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp {

/// What is known of an operator of LibTorch by its name alone, as no schema says it.
struct OperatorName {
  enum Bits : uint32_t {
    /// Makes a tensor that autograd does not connect to the operand, though it has the operand's values, or its sizes.
    kUnconnected = 1 << 0,
    /// Autograd records nothing for it, and it is no copy and no view: its results are whole numbers or truth values.
    kWithoutGradient = 1 << 1,
    /// A sharded parameter under it is the shard: `torch::zeros_like(p)` is how optimizers make state.
    kMeansShard = 1 << 2,
    /// It looks at sizes and strides alone, or makes a view. What it returns is gathered when somebody reads it.
    kReadsNoData = 1 << 3,
    kMayCopy = 1 << 4,      ///< a view or a copy; it is made of operators that decide
    kReduction = 1 << 5,    ///< if LibTorch tags it so, too
    kDrawsInPlace = 1 << 6,
    kPointwise = 1 << 7,    ///< beside those that LibTorch tags so
    kNotPointwise = 1 << 8, ///< of the foreach operators, which are pointwise else
    /// Works along the dimension `dim`, or `dims`, and leaves the others alone. Results have the operand's sizes, but along
    /// `dim`.
    kAlongDim = 1 << 9,
    kReadsMemory = 1 << 10, ///< is made of others, but reads memory itself, or shows it as another dtype
    kNegatesLazily = 1 << 11,  ///< a view by a bit, which neither a piece nor a window of a DTensor has: it gets a copy
    kRefused = 1 << 12,     ///< would change sizes or memory
  };
};

/// name: without "aten::" and the overload. Returns the OperatorName::Bits of it.
uint32_t bits_of_name(std::string_view name);

}  // namespace fsdp
