#include "group/gradient_division.hpp"

#include <cmath>

namespace fsdp {

GradientDivision gradient_division(double factor, at::ScalarType reduce_dtype) {
  double before = 1;
  while (reduce_dtype == at::kHalf && std::fmod(factor, before) == 0 && before * before < factor) before *= 2;
  return {.before = before, .after = factor / before};
}

}  // namespace fsdp
