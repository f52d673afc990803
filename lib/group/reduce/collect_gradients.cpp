#include "group/reduce/collect_gradients.hpp"

#include <ATen/ATen.h>

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "base/require.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/mean_over_ranks.hpp"
#include "group/reduce/reduce_call.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {
namespace {

/// That the gradients at hand promote to, where they count as they are and go together.
std::optional<at::ScalarType> joint_dtype(ParamGroup& group) {
  const auto& dtypes = group.gradients().dtypes;
  if (!dtypes.takes_any()) return std::nullopt;
  auto& store = group.gradients().store;
  std::optional<at::ScalarType> joint;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& param = group.params()[i];
    if (!dtypes.takes_any(i)) continue;
    require(!group.options().reduce.reduces_unused_params || !param.requires_grad(),
            "{}: set_reduce_scatter_unused_params needs one gradient dtype on all ranks, but grad_dtype is None; set "
            "MixedPrecisionPolicy::reduce_dtype, or a grad_dtype",
            param.name());
    if (!dtypes.promotes()) continue;
    const auto unsharded_param = param.unsharded_param();
    for (const auto& gradient : {unsharded_param.defined() ? accumulated_grad(unsharded_param) : at::Tensor(),
                                 store.accumulated(i), store.partial_sum(i)})
      if (gradient.defined()) joint = at::promote_types(joint.value_or(gradient.scalar_type()), gradient.scalar_type());
  }
  if (!joint) return std::nullopt;
  for (size_t i = 0; i < group.params().size(); ++i)
    if (!dtypes.takes_any(i) && at::isFloatingType(dtypes.reduce_dtype(i)))
      joint = at::promote_types(*joint, dtypes.reduce_dtype(i));
  return joint;
}

/// Sorts gradients into buckets. Most often they are those of the reduction before, whose buckets are filled again then: they
/// have their lists, their layout and their views.
class Collection {
 public:
  /// kept: buckets of an earlier reduction, recycled.
  Collection(ParamGroup& group, std::optional<at::ScalarType> joint, std::vector<ReduceBucket> kept)
      : group_(group), joint_(joint), taken_(kept.size(), 0) {
    inputs_.buckets = std::move(kept);
  }

  /// gradient: undefined where there is none, or none yet.
  void add(size_t index, at::Tensor gradient);
  void add_alone(size_t index, at::Tensor gradient);
  /// Behind the last one.
  ReduceInputs finish();

 private:
  at::ScalarType dtype_of(size_t index, const at::Tensor& gradient) const;
  size_t bucket_of(at::ScalarType dtype);

  ParamGroup& group_;
  std::optional<at::ScalarType> joint_;
  ReduceInputs inputs_;
  c10::SmallVector<size_t, 4> taken_;  // by bucket: its entries that are of this reduction, the first ones
  size_t used_ = 0;                    // buckets of this reduction, the first ones
};

/// Of the bucket's entries only the first `taken` stay.
void cut(ReduceBucket& bucket, size_t taken) {
  bucket.segments.resize(taken == 0 ? 0 : bucket.entries[taken - 1].segment + 1);
  bucket.indices.resize(taken);
  bucket.entries.resize(taken);
  bucket.reduce_scatter.layout.reset();
}

at::ScalarType Collection::dtype_of(size_t index, const at::Tensor& gradient) const {
  const auto& dtypes = group_.gradients().dtypes;
  const auto own = sum_dtype(group_, index, gradient.defined() ? std::optional(gradient.scalar_type()) : std::nullopt);
  if (joint_) return at::isFloatingType(own) ? *joint_ : own;
  const auto& sum = group_.gradients().store.partial_sum(index);  // not to be rounded, either
  return sum.defined() && dtypes.takes_any(index) ? at::promote_types(own, sum.scalar_type()) : own;
}

/// Buckets are in the order of their first parameters, as their collectives will be: one that gets its first entry goes to the
/// end of those that have some.
size_t Collection::bucket_of(at::ScalarType dtype) {
  auto& buckets = inputs_.buckets;
  const auto found = static_cast<size_t>(std::ranges::find(buckets, dtype, &ReduceBucket::dtype) - buckets.begin());
  if (found < used_) return found;
  if (found == buckets.size()) {
    auto& made = buckets.emplace_back(ReduceBucket{.dtype = dtype});
    taken_.push_back(0);
    const size_t most = group_.params().size();
    made.indices.reserve(most);
    made.entries.reserve(most);
    made.segments.reserve(most);
  }
  if (found != used_) std::swap(buckets[found], buckets[used_]);
  return used_++;
}

void Collection::add(size_t index, at::Tensor gradient) {
  const auto& layout = group_.parts().layout;
  const size_t p = bucket_of(dtype_of(index, gradient));
  auto& bucket = inputs_.buckets[p];
  const size_t taken = taken_[p]++;
  const size_t segment = layout.segment_of(index);
  const bool is_new_segment = taken == 0 || layout.segment_of(bucket.indices[taken - 1]) != segment;
  const auto& spec = group_.params()[index].spec;
  ReduceEntry entry{.gradient = {},
                    .layout = &spec.layout,
                    .segment = taken == 0 ? 0 : bucket.entries[taken - 1].segment + (is_new_segment ? 1 : 0),
                    .start = layout.start_of(index),
                    .is_cast = spec.param_dtype != bucket.dtype};
  const int64_t piece_numel = layout.piece_numel(segment);
  const bool is_known = taken < bucket.indices.size() && bucket.indices[taken] == index &&
                        bucket.entries[taken].is_like(entry) && bucket.segments[entry.segment].piece_numel == piece_numel;
  if (is_known) {
    bucket.entries[taken].gradient = std::move(gradient);
    return;
  }
  cut(bucket, taken);
  if (is_new_segment) bucket.segments.push_back({piece_numel});
  bucket.indices.push_back(index);
  entry.gradient = std::move(gradient);
  bucket.entries.push_back(std::move(entry));
}

ReduceInputs Collection::finish() {
  auto& buckets = inputs_.buckets;
  buckets.erase(buckets.begin() + static_cast<std::ptrdiff_t>(used_), buckets.end());
  for (size_t p = 0; p < used_; ++p)
    if (taken_[p] < buckets[p].indices.size()) cut(buckets[p], taken_[p]);
  return std::move(inputs_);
}

void Collection::add_alone(size_t index, at::Tensor gradient) {
  const auto& param = group_.params()[index];
  auto& buffer_bytes = group_.parts().comm_ctx->meter.total().buffer_bytes;
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
  inputs_.alone.emplace_back(index, std::move(gradient));
}

}  // namespace

ReduceInputs collect_gradients(ParamGroup& group) {
  const bool is_alone = reduces_alone(group);
  auto& gradients = group.gradients();
  Collection collection(group, joint_dtype(group), std::exchange(gradients.kept_buckets, {}));
  for (const size_t i : group.parts().layout.order()) {
    const auto& param = group.params()[i];
    group.parts().comm_ctx->meter.total().buffer_bytes += gradients.store.bytes_to_take(i);
    if (param.unsharded.peek() == nullptr) continue;
    auto gradient = gradients.store.take(i);
    const bool takes_part = gradient.defined() || gradients.store.partial_sum(i).defined() ||
                            (gradients.options.reduces_unused_params && param.requires_grad());
    if (!takes_part) continue;
    if (is_alone)
      collection.add_alone(i, std::move(gradient));
    else
      collection.add(i, std::move(gradient));
  }
  return collection.finish();
}

std::vector<ReduceBucket> expected_buckets(ParamGroup& group) {
  Collection collection(group, std::nullopt, {});
  for (const size_t i : group.parts().layout.order()) {
    const auto& param = group.params()[i];
    if (param.unsharded.peek() != nullptr && param.requires_grad()) collection.add(i, {});
  }
  return collection.finish().buckets;
}

void keep_buckets(ParamGroup& group, std::vector<ReduceBucket> buckets) {
  for (auto& bucket : buckets) {
    bucket.all_reduce.reset();
    for (auto& entry : bucket.entries) entry.gradient.reset();
    recycle_reduce_scatter(bucket.reduce_scatter);
    bucket.hook_input.reset();
    bucket.is_divided = false;
  }
  group.gradients().kept_buckets = std::move(buckets);
}

}  // namespace fsdp
