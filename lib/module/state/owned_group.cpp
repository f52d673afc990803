#include "module/state/owned_group.hpp"

#include "base/require.hpp"
#include "root/configure.hpp"

namespace fsdp {

std::vector<std::shared_ptr<ParamGroup>> live_groups(const std::vector<OwnedGroup>& groups) {
  std::vector<std::shared_ptr<ParamGroup>> live;
  for (const auto& owned : groups)
    if (auto group = owned.group.lock()) live.push_back(std::move(group));
  return live;
}

std::shared_ptr<ParamGroup> find_group(const std::vector<OwnedGroup>& groups, const MeshInfo& info) {
  for (const auto& owned : groups)
    if (owned.mesh_info.mesh == info.mesh && owned.mesh_info.use == info.use) return owned.group.lock();
  return nullptr;
}

void check_registrations(const OwnedGroup& owned) {
  const auto group = owned.group.lock();
  if (!group) return;
  for (const auto& entry : owned.registrations) {
    if (is_gone(entry)) continue;
    const auto* tensor = tensor_at(entry);
    require_state(tensor != nullptr && tensor->unsafeGetTensorImpl() == group->params()[entry.param].sharded.identity(),
                  "{}: the module's parameter table holds another tensor than fully_shard put "
                  "there; write values with copy_ instead of replacing the parameter",
                  group->params()[entry.param].name());
  }
}

void check_reshard(const std::vector<OwnedGroup>& groups, ReshardAfterForward request) {
  for (const auto& owned : groups)
    if (request.is_integer() && owned.mesh_info.use != MeshUse::kReplicateBeside)
      check_reshard_ranks(owned.mesh_info, request.ranks());
}

void plan_reshard(std::vector<OwnedGroup>& groups, ReshardAfterForward request) {
  std::vector<std::optional<ReshardPlan>> plans(groups.size());  // all of them before the first change
  for (size_t i = 0; i < groups.size(); ++i)
    if (request.is_integer() && groups[i].mesh_info.use != MeshUse::kReplicateBeside)
      plans[i] = make_reshard_plan(groups[i].mesh_info, request.ranks());
  for (size_t i = 0; i < groups.size(); ++i) groups[i].integer_plan = std::move(plans[i]);
}

namespace {

ReshardPlan plan_of(const OwnedGroup& owned, ReshardAfterForward request, bool is_root) {
  if (owned.integer_plan) return *owned.integer_plan;
  const bool asks = request.is_set() ? request.value() : !is_root;
  const bool reshard = asks && owned.mesh_info.use != MeshUse::kReplicateBeside;
  return {.reshard = reshard, .ranks = reshard ? owned.mesh_info.shard_size() : 1, .post_forward_group = nullptr};
}

}  // namespace

void apply_reshard(const std::vector<OwnedGroup>& groups, ReshardAfterForward request, bool is_root) {
  for (const auto& owned : groups) {
    const auto group = owned.group.lock();
    if (!group) continue;
    configure(*group, [&](GroupOptions& options) {
      options.residency.after_forward = plan_of(owned, request, is_root);
      options.residency.is_after_forward_unset = !request.is_set();
    });
  }
}

}  // namespace fsdp
