#include "group/reduce/mean_over_ranks.hpp"

namespace fsdp {

GradientDivision division_of(const ParamGroup& group, at::ScalarType sum) {
  const int ranks = group.identity().mesh_info.data_parallel_size();
  const double factor = group.options().reduce.divide_factor.value_or(ranks);
  // Only a sum leaves float16's range.
  return gradient_division(factor, sum == at::kHalf && reduces_alone(group) ? at::kFloat : sum);
}

/// One before the last would have to be as often there.
std::optional<double> scale_in_collective(const ParamGroup& group, at::ScalarType sum) {
  const auto [before, after] = division_of(group, sum);
  // A division in two parts keeps sums in float16's range, which a product rounded to it does not.
  if (group.options().reduce.forces_sum || before != 1 || after == 1) return std::nullopt;
  return 1 / after;
}

}  // namespace fsdp
