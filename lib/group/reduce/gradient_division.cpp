#include "group/reduce/gradient_division.hpp"

#include <ATen/ATen.h>

#include <cmath>

namespace fsdp {

GradientDivision gradient_division(double factor, at::ScalarType reduce_dtype) {
  double before = 1;
  while (reduce_dtype == at::kHalf && std::fmod(factor, before) == 0 && before * before < factor) before *= 2;
  return {.before = before, .after = factor / before};
}

void Divisor::divide(const at::Tensor& values, double factor) {
  const auto dtype = values.scalar_type();
  // Of smaller dtypes the kernel divides by the number as it was before it was cast.
  if (!values.is_cpu() || (dtype != at::kFloat && dtype != at::kDouble)) {
    values.div_(factor);
    return;
  }
  if (factor != factor_ || number_.scalar_type() != dtype) {
    number_ = at::scalar_tensor(factor, dtype);
    factor_ = factor;
  }
  values.div_(number_);
}

}  // namespace fsdp
