#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// What gradients are divided by: before they are summed over the ranks, and the sum.
struct GradientDivision {
  double before = 1, after = 1;
};

/// Parts a division by `factor` (the ranks, by default) of sums in `reduce_dtype`. Only float16, whose
/// range neither a sum nor a small gradient is to leave, is divided in two parts, about the square root
/// each: `before` starts at 1 and doubles while it divides `factor` and before * before < factor.
GradientDivision gradient_division(double factor, at::ScalarType reduce_dtype);

/// Divides as Tensor::div_ by a number does. On CPU that makes a tensor of the number each time and casts it, which takes
/// longer than to divide a thousand values; this one keeps the tensor.
class Divisor {
 public:
  void divide(const at::Tensor& values, double factor);

 private:
  double factor_ = 0;
  at::Tensor number_;
};

}  // namespace fsdp
