#include "module/module_state.hpp"

#include "base/require.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"

namespace fsdp {

std::shared_ptr<ModuleState> ModuleState::root() {
  auto state = shared_from_this();
  while (auto above = state->parent.lock()) state = above;
  return state;
}

void ModuleState::visit(const std::function<void(ModuleState&)>& visitor) {
  visitor(*this);
  for (auto& state : nested) state->visit(visitor);
}

bool ModuleState::has_group_below() {
  bool found = false;
  visit([&](ModuleState& state) { found |= !state.group.expired(); });
  return found;
}

ReshardPlan ModuleState::plan_reshard(ReshardAfterForward request) {
  const int64_t world = mesh_info.shard_size();
  if (request.is_integer()) return make_reshard_plan(mesh_info, request.ranks());
  const bool reshard = request.is_set() ? request.value() : !is_root();
  return {.reshard = reshard, .ranks = reshard ? world : 1, .post_forward_group = nullptr};
}

void ModuleState::apply_reshard_policy() {
  const auto owned = group.lock();
  if (!owned) return;
  owned->policy().after_forward = integer_plan ? *integer_plan : plan_reshard(requested_reshard);
  owned->policy().is_after_forward_unset = !requested_reshard.is_set();
}

void ModuleState::take_root() {
  auto context = this->context;
  visit([&](ModuleState& state) {
    if (state.context == context) return;
    state.context = context;
    if (const auto owned = state.group.lock()) {
      const auto before = owned->context;  // outlives the call that empties it
      owned->reshard();
      before->remove(*owned);
      context->add(owned);
    }
  });
  number(0, "");
  context->on_step = [weak = weak_from_this()] {
    if (const auto state = weak.lock())
      state->visit([](ModuleState& below) { below.check_registrations(); });
  };
}

int ModuleState::number(int next, const std::string& prefix) {
  name = join_path(prefix, units.front().path);
  description = name.empty() ? "root" : name;
  const auto owned = group.lock();
  if (owned) owned->tree_enter = next;
  ++next;
  for (auto& state : nested) next = state->number(next, name);
  if (owned) {
    owned->tree_exit = next;
    std::vector<std::string> full;
    for (size_t i = 0; i < param_names.size(); ++i)
      full.push_back(join_path(join_path(prefix, units[param_units[i]].path), param_names[i]));
    owned->rename(description, full);
  }
  apply_reshard_policy();
  return next;
}

void ModuleState::check_registrations() {
  const auto owned = group.lock();
  if (!owned) return;
  for (const auto& entry : registrations) {
    if (entry.is_shared && entry.alive.expired()) continue;
    auto& table = ModuleAccess::parameters(*entry.module);
    const bool holds = entry.slot < table.size() &&
                       table[entry.slot].value().unsafeGetTensorImpl() ==
                           owned->params()[entry.param].registered_impl();
    require_state(holds,
                  "{}: the module's parameter table holds another tensor than fully_shard put "
                  "there; write values with copy_ instead of replacing the parameter",
                  owned->params()[entry.param].name());
  }
}

}  // namespace fsdp
