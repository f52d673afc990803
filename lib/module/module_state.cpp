#include "module/module_state.hpp"

#include <algorithm>

#include "base/require.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "root/find_param.hpp"
#include "root/group_conversion.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// What the module tree has to do around its root's steps.
class TreeHooks final : public StepHooks {
 public:
  /// has_modes: a group's dtype depends on its modules' mode.
  TreeHooks(std::weak_ptr<ModuleState> root, bool has_modes) : root_(std::move(root)), has_modes_(has_modes) {}

  void check_modules() override {
    if (const auto root = root_.lock()) root->visit([](ModuleState& below) { below.check_registrations(); });
  }
  void follow_modes() override {
    if (!has_modes_) return;
    if (const auto root = root_.lock()) root->visit([](ModuleState& below) { below.follow_mode(); });
  }

 private:
  std::weak_ptr<ModuleState> root_;
  bool has_modes_;
};

}  // namespace

Registration registration_at(torch::nn::Module& module, size_t slot) {
  auto alive = module.weak_from_this();
  const bool is_shared = !alive.expired();
  return {&module, std::move(alive), is_shared, ModuleAccess::parameters(module)[slot].key(), slot, /*param=*/0};
}

std::shared_ptr<ModuleState> ModuleState::root() {
  auto state = shared_from_this();
  while (auto above = state->parent.lock()) state = above;
  return state;
}

void ModuleState::visit(const std::function<void(ModuleState&)>& visitor) {
  visitor(*this);
  for (auto& state : nested) state->visit(visitor);
}

std::vector<std::shared_ptr<ParamGroup>> ModuleState::live_groups() const {
  std::vector<std::shared_ptr<ParamGroup>> live;
  for (const auto& owned : groups)
    if (auto group = owned.group.lock()) live.push_back(std::move(group));
  return live;
}

bool ModuleState::has_group_below() {
  bool found = false;
  // Asked by whichever thread looks through the table: a group that is another rank's is not to be held, or it may go there.
  visit([&](ModuleState& state) {
    found |= std::any_of(state.groups.begin(), state.groups.end(),
                         [](const auto& owned) { return !owned.group.expired(); });
  });
  return found;
}

ReshardPlan ModuleState::plan_reshard(ReshardAfterForward request, const MeshInfo& info) const {
  const int64_t world = info.shard_size();
  if (info.use == MeshUse::kReplicateBeside) return {.reshard = false, .ranks = 1, .post_forward_group = nullptr};
  if (request.is_integer()) return make_reshard_plan(info, request.ranks());
  const bool reshard = request.is_set() ? request.value() : !is_root();
  return {.reshard = reshard, .ranks = reshard ? world : 1, .post_forward_group = nullptr};
}

void ModuleState::check_reshard(ReshardAfterForward request) const {
  for (const auto& owned : groups)
    if (request.is_integer() && owned.mesh_info.use != MeshUse::kReplicateBeside)
      check_reshard_ranks(owned.mesh_info, request.ranks());
}

void ModuleState::apply_reshard_policy() {
  for (const auto& owned : groups) {
    const auto group = owned.group.lock();
    if (!group) continue;
    auto plan = owned.integer_plan ? *owned.integer_plan : plan_reshard(requested_reshard, owned.mesh_info);
    root_of(*group).set_policy(*group, &GroupPolicy::after_forward, std::move(plan));
    root_of(*group).set_policy(*group, &GroupPolicy::is_after_forward_unset, !requested_reshard.is_set());
  }
}

void ModuleState::take_root() {
  auto context = this->context;
  visit([&](ModuleState& state) {
    if (state.context == context) return;
    state.context = context;
    for (const auto& group : state.live_groups()) {
      const auto before = GroupPort::of(*group).root();  // outlives the call that empties it
      before->remove(*group);
      context->add(group);
    }
  });
  number(0, "");
  bool has_modes = false;
  visit([&](ModuleState& below) { has_modes |= below.mp_policy.full_precision_in_eval; });
  context->set_hooks(std::make_shared<TreeHooks>(weak_from_this(), has_modes));
}

int ModuleState::number(int next, const std::string& prefix) {
  name = join_path(prefix, units.front().path);
  description = name.empty() ? "root" : name;
  const int enter = next++;
  for (auto& state : nested) next = state->number(next, name);
  for (const auto& owned : groups) {
    const auto group = owned.group.lock();
    if (!group) continue;
    group->parts().tree = {.enter = enter, .exit = next};
    std::vector<std::string> full;
    for (const auto& param : owned.params)
      full.push_back(join_path(join_path(prefix, units[param.unit].path), param.name));
    group->rename(description + owned.suffix, full);
  }
  apply_reshard_policy();
  return next;
}

at::Tensor SharedEntry::unsharded_param() const {
  if (place.is_shared && place.alive.expired()) return {};
  const auto& table = ModuleAccess::parameters(*place.module);
  return place.slot < table.size() ? table[place.slot].value() : at::Tensor();
}

void ModuleState::check_ties() const {
  for (const auto& entry : shared_entries) {
    const auto found = find_param(entry.unsharded_param());
    require_state(!found,
                  "{}: '{}' of {} is the same parameter, but no sharded module contains both; call "
                  "fully_shard on a module around them, or on the list of them",
                  found ? found->param().name() : "", entry.name, description);
  }
}

bool ModuleState::wants_own_dtype() const {
  bool is_any_alive = false;
  for (const auto& unit : units) {
    const auto module = unit.alive.lock();
    if (module && module->is_training()) return false;
    is_any_alive |= module != nullptr;
  }
  return is_any_alive ? mp_policy.full_precision_in_eval : computes_in_own_dtype;
}

void ModuleState::follow_mode() {
  if (!mp_policy.full_precision_in_eval) return;
  const bool own = wants_own_dtype();
  for (const auto& group : live_groups()) compute_in_own_dtype(*group, own);
  computes_in_own_dtype = own;
  torch::NoGradGuard no_grad;
  for (const auto& cast : cast_buffers) {
    const at::Tensor buffer(cast.buffer.lock());
    const auto dtype = own ? cast.dtype : mp_policy.buffer_dtype.value_or(cast.dtype);
    if (buffer.defined() && buffer.scalar_type() != dtype) buffer.set_data(buffer.to(dtype));
  }
}

void ModuleState::check_registrations() {
  check_ties();
  for (const auto& sharer : sharers)
    if (const auto state = sharer.lock()) state->check_ties();
  for (const auto& owned : groups)
    if (const auto group = owned.group.lock()) check_entries(owned.registrations, *group);
}

void ModuleState::check_entries(const std::vector<Registration>& entries, const ParamGroup& group) {
  for (const auto& entry : entries) {
    if (entry.is_shared && entry.alive.expired()) continue;
    auto& table = ModuleAccess::parameters(*entry.module);
    const bool holds = entry.slot < table.size() &&
                       table[entry.slot].value().unsafeGetTensorImpl() ==
                           group.params()[entry.param].sharded.identity();
    require_state(holds,
                  "{}: the module's parameter table holds another tensor than fully_shard put "
                  "there; write values with copy_ instead of replacing the parameter",
                  group.params()[entry.param].name());
  }
}

}  // namespace fsdp
