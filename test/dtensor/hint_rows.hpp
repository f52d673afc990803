#pragma once

#include <string_view>
#include <vector>

namespace fsdp::test {

/// What operators of these names ("add", or of one overload "add.Tensor") need their operands to be.
///
/// Sizes are numbers, or capital letters, each drawn once a call: of 1 to 4. A tensor's kind follows its sizes: float without one, d: double,
/// c: complex, h: half, g: bfloat16, b: bool, p: in (0, 1), lN (iN): long (int) below N, o: ones, int, u: symmetric and positive definite, t: lower
/// triangular. "~" is none, "()" no sizes. Lists are separated by "|". What is not said has its default, or is drawn by its type.
struct HintRow {
  std::string_view names, text;
};
const std::vector<HintRow>& hint_rows();

}  // namespace fsdp::test
