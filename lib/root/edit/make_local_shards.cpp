#include "root/edit/make_local_shards.hpp"

#include <algorithm>

#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "root/edit/edit_group.hpp"
#include "root/edit/group_conversion.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// Flat runs cannot be put in another order: every rank would hold other elements.
void check_adjacent(const ParamGroup& group, const std::vector<LocalShards::Class>& classes) {
  const auto& layout = group.parts().layout;
  auto order = layout.order();
  std::erase_if(order, [&](size_t i) { return group.params()[i].has_moved_away; });
  for (const auto& one : classes) {
    const auto first = std::find(order.begin(), order.end(), one.members.front());
    const bool is_run = std::equal(one.members.begin(), one.members.end(), first) &&
                        layout.segment_of(one.members.front()) == layout.segment_of(one.members.back());
    require(is_run,
            "local_shards: in the flat layout of '{}' the parameters with label '{}' do not follow each other "
            "in one run; use one label for all, or ParamLayout::kPerParameter",
            group.name(), one.label);
  }
}

/// One tensor has one dtype.
void check_gradients(const ParamGroup& group, const std::vector<LocalShards::Class>& classes) {
  const auto& dtypes = group.gradients().dtypes;
  for (const auto& one : classes)
    for (const size_t i : one.members) {
      if (!one.is_trainable || dtypes.kept_dtype(i)) continue;
      const size_t first = one.members[0];
      require(!dtypes.takes_any(i),
              "local_shards: '{}' has grad_dtype None, so that its gradients may have any dtype, but a local shard of several "
              "parameters needs one dtype; set its grad_dtype, or reduce_dtype",
              group.params()[i].name());
      require(dtypes.reduce_dtype(i) == dtypes.reduce_dtype(first),
              "local_shards: with keep_low_precision_grads the gradients of '{}' would be {} and that of '{}' {}; "
              "give them different labels, or set reduce_dtype",
              group.params()[first].name(), c10::toString(dtypes.reduce_dtype(first)), group.params()[i].name(),
              c10::toString(dtypes.reduce_dtype(i)));
    }
}

}  // namespace

LocalShards& make_local_shards(ParamGroup& group, const std::vector<std::string>& labels) {
  const auto root = GroupPort::of(group).root();
  std::lock_guard lock(root->mutex());
  auto& parts = group.parts();
  if (const auto& classes = parts.local_shards) {
    require(classes->labels() == labels,
            "local_shards: the parameters of '{}' have other labels from an earlier call; give the same labels in every call",
            group.name());
    return *classes;
  }
  check_convertible(group);
  group.changes().sync_requires_grad();
  group.changes().sync_grad_dtypes();
  auto classes = LocalShards::plan(group, labels);
  if (parts.config.layout == ParamLayout::kFlat) check_adjacent(group, classes);
  check_gradients(group, classes);
  {
    const BelowResidency below;
    group.changes().refresh();
  }
  edit(group, {.classes = std::make_unique<LocalShards>(std::move(classes), labels)});
  return *parts.local_shards;
}

}  // namespace fsdp
