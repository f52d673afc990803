#include "group/reduce/collect_gradients.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "base/require.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/reduce_call.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {
namespace {

/// That the gradients at hand promote to, where they count as they are and go together.
std::optional<at::ScalarType> joint_dtype(ParamGroup& group) {
  const auto& dtypes = group.gradient_dtypes();
  if (!dtypes.takes_any()) return std::nullopt;
  std::optional<at::ScalarType> joint;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& param = group.params()[i];
    if (!dtypes.takes_any(i)) continue;
    require(!group.reduction().reduces_unused_params || !param.requires_grad(),
            "{}: with set_reduce_scatter_unused_params a grad_dtype of None leaves open in which dtype the ranks without a "
            "gradient reduce; set MixedPrecisionPolicy::reduce_dtype, or a grad_dtype",
            param.name());
    if (!dtypes.promotes()) continue;
    const auto unsharded_param = param.unsharded_param();
    for (const auto& gradient : {unsharded_param.defined() ? unsharded_param.grad() : at::Tensor(), group.gradients().accumulated(i),
                                 group.gradients().partial_sum(i)})
      if (gradient.defined()) joint = at::promote_types(joint.value_or(gradient.scalar_type()), gradient.scalar_type());
  }
  if (!joint) return std::nullopt;
  for (size_t i = 0; i < group.params().size(); ++i)
    if (!dtypes.takes_any(i) && at::isFloatingType(dtypes.reduce_dtype(i)))
      joint = at::promote_types(*joint, dtypes.reduce_dtype(i));
  return joint;
}

class Collection {
 public:
  Collection(ParamGroup& group, std::optional<at::ScalarType> joint) : group_(group), joint_(joint) {}

  /// gradient: undefined where there is none, or none yet.
  void add(size_t index, at::Tensor gradient);
  void add_alone(size_t index, at::Tensor gradient);

  ReduceInputs inputs;

 private:
  at::ScalarType dtype_of(size_t index, const at::Tensor& gradient) const;
  ReducePart& part_of(at::ScalarType dtype);

  ParamGroup& group_;
  std::optional<at::ScalarType> joint_;
};

at::ScalarType Collection::dtype_of(size_t index, const at::Tensor& gradient) const {
  const auto& dtypes = group_.gradient_dtypes();
  auto own = dtypes.reduce_dtype(index, gradient.defined() ? std::optional(gradient.scalar_type()) : std::nullopt);
  if (joint_) return at::isFloatingType(own) ? *joint_ : own;
  const auto& sum = group_.gradients().partial_sum(index);  // not to be rounded, either
  return sum.defined() && dtypes.takes_any(index) ? at::promote_types(own, sum.scalar_type()) : own;
}

ReducePart& Collection::part_of(at::ScalarType dtype) {
  const auto part = std::ranges::find(inputs.parts, dtype, &ReducePart::dtype);
  if (part != inputs.parts.end()) return *part;
  auto& made = inputs.parts.emplace_back(ReducePart{.dtype = dtype});
  const size_t most = group_.params().size();
  made.indices.reserve(most);
  made.entries.reserve(most);
  made.units.reserve(most);
  return made;
}

void Collection::add(size_t index, at::Tensor gradient) {
  const auto& param = group_.params()[index];
  const auto& layout = group_.layout();
  auto& part = part_of(dtype_of(index, gradient));
  const size_t unit = layout.unit_of(index);
  const bool is_new_unit = part.indices.empty() || layout.unit_of(part.indices.back()) != unit;
  if (is_new_unit) part.units.push_back({layout.piece_numel(unit)});
  part.indices.push_back(index);
  part.entries.push_back({.gradient = std::move(gradient),
                          .layout = &param.layout(),
                          .unit = part.units.size() - 1,
                          .start = layout.start_of(index),
                          .is_cast = param.spec.param_dtype != part.dtype});
}

void Collection::add_alone(size_t index, at::Tensor gradient) {
  const auto& param = group_.params()[index];
  auto& buffer_bytes = group_.comm_ctx()->meter.total().buffer_bytes;
  if (!gradient.defined()) {
    gradient = at::zeros(param.spec.sizes(), param.unsharded_param().options().requires_grad(false));
    buffer_bytes += static_cast<int64_t>(gradient.nbytes());
  }
  if (!param.layout().is_whole()) gradient = fsdp::part_of(param.layout(), gradient, /*rank=*/0);
  const auto dtype = dtype_of(index, gradient);
  if (param.grad_dtype().takes_any() && gradient.scalar_type() != dtype) {
    gradient = gradient.to(dtype);
    buffer_bytes += static_cast<int64_t>(gradient.nbytes());
  }
  inputs.alone.emplace_back(index, std::move(gradient));
}

}  // namespace

ReduceInputs collect_gradients(ParamGroup& group) {
  const bool is_alone = reduces_alone(group);
  auto& gradients = group.gradients();
  Collection collection(group, joint_dtype(group));
  for (const size_t i : group.layout().order()) {
    const auto& param = group.params()[i];
    group.comm_ctx()->meter.total().buffer_bytes += gradients.bytes_to_take(i);
    const auto unsharded_param = param.unsharded_param();
    if (!unsharded_param.defined()) continue;
    auto gradient = gradients.take(i);
    const bool takes_part = gradient.defined() || gradients.partial_sum(i).defined() ||
                            (group.reduction().reduces_unused_params && param.requires_grad());
    if (!takes_part) continue;
    if (is_alone)
      collection.add_alone(i, std::move(gradient));
    else
      collection.add(i, std::move(gradient));
  }
  return std::move(collection.inputs);
}

std::vector<ReducePart> expected_parts(ParamGroup& group) {
  Collection collection(group, std::nullopt);
  for (const size_t i : group.layout().order()) {
    const auto& param = group.params()[i];
    if (param.unsharded_param().defined() && param.requires_grad()) collection.add(i, {});
  }
  return std::move(collection.inputs.parts);
}

}  // namespace fsdp
