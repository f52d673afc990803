#include "group/reduce/unreduced_gradients.hpp"

#include <ATen/ATen.h>

#include "group/param_group.hpp"
#include "group/reduce/dense_gradient.hpp"
#include "param/residency.hpp"

namespace fsdp {

at::Tensor take_gradient(ParamGroup& group, size_t index) {
  auto& param = group.params()[index];
  auto& fresh = param.handle().mutable_grad();
  auto& accumulated = group.tally.accumulated(index);
  auto gradient = dense_gradient(std::exchange(fresh, {}));
  if (!accumulated.defined()) return gradient;
  if (gradient.defined()) accumulated.add_(gradient);
  return std::exchange(accumulated, {});
}

int64_t bytes_to_take(ParamGroup& group, size_t index) {
  const auto& sum = group.tally.accumulated(index);
  if (!sum.defined() || !sum.is_cpu()) return 0;
  const auto handle = group.params()[index].handle();
  if (!handle.defined() || !handle.grad().defined()) return 0;
  return handle.grad().scalar_type() == sum.scalar_type() ? 0 : static_cast<int64_t>(sum.nbytes());
}

bool has_unreduced_gradients(ParamGroup& group) {
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto handle = group.params()[i].handle();
    if (handle.defined() && handle.grad().defined()) return true;
    if (group.tally.accumulated(i).defined()) return true;
    if (group.tally.partial_sum(i).defined() && group.reduction().requires_all_reduce) return true;
  }
  return false;
}

void accumulate_in_reduce_dtype(ParamGroup& group) {
  BelowResidency below;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& param = group.params()[i];
    const auto dtype = group.gradient_dtypes().reduce_dtype(i);
    const auto handle = param.handle();
    if (dtype == param.param_dtype() || !handle.defined() || !handle.grad().defined()) continue;
    group.tally.accumulated(i) = take_gradient(group, i).to(dtype);
  }
}

void drop_unreduced_gradients(ParamGroup& group) {
  for (size_t i = 0; i < group.params().size(); ++i) {
    if (const auto handle = group.params()[i].handle(); handle.defined())
      handle.mutable_grad().reset();
    group.tally.partial_sum(i).reset();
    group.tally.accumulated(i).reset();
  }
}

}  // namespace fsdp
