#include "group/group_facts.hpp"

#include "group/param_group.hpp"

namespace fsdp {

namespace {

KeepRule rule_of(const GroupPolicy& policy) {
  if (policy.is_after_forward_unset) return KeepRule::kPlanned;
  return policy.after_forward.reshard ? KeepRule::kReleased : KeepRule::kKept;
}

}  // namespace

std::vector<GroupFacts> facts_of(std::span<ParamGroup* const> groups) {
  std::vector<GroupFacts> facts(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i] == nullptr) continue;
    const auto& group = *groups[i];
    const bool is_released = !group.parts().is_never_released();
    facts[i] = {.name = group.name(),
                .unsharded_bytes = is_released ? group.parts().unsharded_bytes() : 0,
                .rule = rule_of(group.policy()),
                .stays_after_backward = is_released && !group.policy().reshard_after_backward};
  }
  return facts;
}

std::vector<FirstValuesOfGroup> take_first_values(std::span<ParamGroup* const> groups) {
  std::vector<FirstValuesOfGroup> all;
  for (auto* group : groups) {
    auto values = group->take_first_values();
    if (!values) continue;
    std::vector<int64_t> versions;
    for (const auto& param : group->params()) versions.push_back(param.version());
    all.push_back({group->identity(), std::move(values), std::move(versions)});
  }
  return all;
}

}  // namespace fsdp
