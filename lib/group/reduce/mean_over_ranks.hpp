#pragma once

#include <optional>

#include "group/param_group.hpp"
#include "group/reduce/gradient_division.hpp"
#include "group/reduce/reduce_call.hpp"

// How the mean of gradients over a group's ranks is taken, whoever takes it: backward's reductions and torch::autograd::grad.
namespace fsdp {

struct ReduceDtypes {
  at::ScalarType sum;   ///< gradients are added up in it, and the sum is divided in it
  at::ScalarType kept;  ///< the mean is given in it
};

/// Says in what a mean that was added up in `sum` is given.
inline at::ScalarType kept_dtype(const ParamGroup& group, size_t index, at::ScalarType sum) {
  return group.gradients().dtypes.kept_dtype(index).value_or(sum);
}

/// Says in what gradients of parameter `index` alone are added up: a reduction may add several up together in a wider dtype.
/// gradient: the dtype of one that is there, if any is.
inline at::ScalarType sum_dtype(const ParamGroup& group, size_t index, std::optional<at::ScalarType> gradient) {
  const auto sum = group.gradients().dtypes.reduce_dtype(index, gradient);
  if (!gradient || *gradient == sum || !reduces_alone(group)) return sum;
  // One rank has nothing to add up. Where a gradient may be of any dtype it has the one that several ranks give, though.
  return group.params()[index].grad_dtype().takes_any() ? sum : *gradient;
}

inline ReduceDtypes reduce_dtypes(const ParamGroup& group, size_t index, std::optional<at::ScalarType> gradient) {
  const auto sum = sum_dtype(group, index, gradient);
  return {.sum = sum, .kept = kept_dtype(group, index, sum)};
}

/// Says what gradients are divided by that are added up in `sum`.
GradientDivision division_of(const ParamGroup& group, at::ScalarType sum);
/// Says what the last collective over them can multiply by in place of the division behind it; none: it cannot.
std::optional<double> scale_in_collective(const ParamGroup& group, at::ScalarType sum);

}  // namespace fsdp
