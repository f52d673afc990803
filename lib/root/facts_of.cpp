#include "root/facts_of.hpp"

#include "group/param_group.hpp"

namespace fsdp {

GroupFacts facts_of(const ParamGroup& group, int ranks) {
  const auto& parts = group.parts();
  const auto& policy = group.options().residency;
  return {.name = group.name(),
          .unsharded_bytes = parts.unsharded_bytes(),
          // Without values it is asked for, which says so.
          .is_never_released = parts.is_never_released() && !parts.config.device.is_meta(),
          .tree = parts.tree,
          .reduce = {.ranks = ranks, .is_apart = group.options().reduce.uses_separate_group},
          .reshards_after_forward = policy.after_forward.reshard,
          .is_after_forward_unset = policy.is_after_forward_unset,
          .reshards_after_backward = policy.reshard_after_backward,
          .stays_after_evaluation = policy.stays_after_evaluation,
          .prefetches_in_backward = policy.prefetch_in_backward,
          .has_forward_list = !policy.forward_prefetch.empty(),
          .has_backward_list = !policy.backward_prefetch.empty()};
}

std::vector<FirstValuesOfGroup> take_first_values(std::span<ParamGroup* const> groups) {
  std::vector<FirstValuesOfGroup> all;
  for (auto* group : groups) {
    auto values = group->notes().take_first_values();
    if (!values) continue;
    std::vector<int64_t> versions;
    for (const auto& param : group->params()) versions.push_back(param.sharded.version());
    all.push_back({group->identity(), std::move(values), std::move(versions)});
  }
  return all;
}

}  // namespace fsdp
