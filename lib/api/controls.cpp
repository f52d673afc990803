#include "base/require.hpp"
#include "fsdp/fully_shard.hpp"
#include "module/module_state.hpp"

// The controls of a sharded module. Without parameters to shard every one of them does nothing.
namespace fsdp {

namespace {

template <class Action>
void for_group(ModuleState& state, Action&& action) {
  if (const auto group = state.group.lock()) action(*group);
}

template <class Action>
void for_groups(ModuleState& state, Recurse recurse, Action&& action) {
  if (recurse == Recurse::kNo) return for_group(state, action);
  state.visit([&](ModuleState& below) { for_group(below, action); });
}

RootContext& root_context(ModuleState& state, const char* control) {
  require_state(state.is_root(), "{}: '{}' is not a root; call it on the root module", control,
                state.description);
  return *state.context;
}

std::vector<std::weak_ptr<ParamGroup>> groups_of(const std::vector<FSDPModule>& modules) {
  std::vector<std::weak_ptr<ParamGroup>> groups;
  for (const auto& module : modules) groups.push_back(module.state().group);
  return groups;
}

}  // namespace

void UnshardHandle::wait() {
  if (!state_) return;
  for_group(*state_, [&](ParamGroup& group) { state_->context->wait_for_unshard(group); });
  state_.reset();
}

void FSDPModule::unshard() {
  for_group(*state_, [&](ParamGroup& group) { state_->context->unshard(group, UnshardMode::kWait); });
}

UnshardHandle FSDPModule::unshard_async() {
  for_group(*state_, [&](ParamGroup& group) { state_->context->unshard(group, UnshardMode::kStart); });
  return UnshardHandle(state_);
}

void FSDPModule::reshard() {
  for_group(*state_, [&](ParamGroup& group) { state_->context->reshard(group); });
}

void FSDPModule::set_requires_gradient_sync(bool value, Recurse recurse) {
  for_groups(*state_, recurse,
             [&](ParamGroup& group) { group.reduction().requires_gradient_sync = value; });
}

void FSDPModule::set_requires_all_reduce(bool value, Recurse recurse) {
  for_groups(*state_, recurse,
             [&](ParamGroup& group) { group.reduction().requires_all_reduce = value; });
}

void FSDPModule::set_is_last_backward(bool value) {
  root_context(*state_, "set_is_last_backward").options().is_last_backward = value;
}

void FSDPModule::set_reshard_after_forward(ReshardAfterForward value, Recurse recurse) {
  auto apply = [&](ModuleState& state) {
    const auto plan = state.plan_reshard(value);
    for_group(state, [&](ParamGroup& group) {
      group.drop_post_forward_shard();
      group.policy().after_forward = plan;
      group.policy().is_after_forward_unset = !value.is_set();
      group.context->budget().invalidate();
    });
    state.requested_reshard = value;
    state.integer_plan.reset();
    if (value.is_integer()) state.integer_plan = plan;
  };
  if (recurse == Recurse::kNo) return apply(*state_);
  state_->visit(apply);
}

void FSDPModule::set_reshard_after_backward(bool value, Recurse recurse) {
  for_groups(*state_, recurse,
             [&](ParamGroup& group) {
               group.policy().reshard_after_backward = value;
               group.context->budget().invalidate();
             });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  for_group(*state_, [&](ParamGroup& group) { group.policy().forward_prefetch = groups_of(modules); });
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  for_group(*state_,
            [&](ParamGroup& group) { group.policy().backward_prefetch = groups_of(modules); });
}

void FSDPModule::set_prefetch_distance(int groups) {
  require(groups >= 0, "set_prefetch_distance: expected 0 or more groups, found {}", groups);
  root_context(*state_, "set_prefetch_distance").options().prefetch_distance = groups;
}

void FSDPModule::set_unsharded_byte_budget(std::optional<int64_t> bytes) {
  auto& context = root_context(*state_, "set_unsharded_byte_budget");
  int64_t largest = 0;
  for (const auto* group : context.groups())
    if (!group->is_never_released()) largest = std::max(largest, group->unsharded_bytes());
  require(!bytes || *bytes >= largest,
          "set_unsharded_byte_budget: expected {} bytes or more, the size of the largest group, found {}",
          largest, bytes.value_or(0));
  context.options().unsharded_byte_budget = bytes;
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  require(factor > 0, "set_gradient_divide_factor: expected a factor above 0, found {}", factor);
  for_groups(*state_, Recurse::kYes,
             [&](ParamGroup& group) { group.reduction().divide_factor = factor; });
}

void FSDPModule::set_force_sum_reduction_for_comms(bool value) {
  for_groups(*state_, Recurse::kYes,
             [&](ParamGroup& group) { group.reduction().forces_sum = value; });
}

void FSDPModule::set_unshard_in_backward(bool value) {
  for_group(*state_, [&](ParamGroup& group) { group.policy().prefetch_in_backward = value; });
}

void FSDPModule::set_reduce_scatter_unused_params(bool value) {
  for_groups(*state_, Recurse::kYes,
             [&](ParamGroup& group) { group.reduction().reduces_unused_params = value; });
}

void FSDPModule::reset_iter_state() {
  root_context(*state_, "reset_iter_state").reset_iter_state();
}

bool FSDPModule::is_root() const { return state_->is_root(); }

bool FSDPModule::is_unsharded() const {
  const auto group = state_->group.lock();
  return !group || group->is_unsharded();
}

const std::string& FSDPModule::name() const { return state_->name; }

std::vector<FSDPModule> FSDPModule::sharded_modules() const {
  std::vector<FSDPModule> modules;
  state_->visit([&](ModuleState& state) { modules.emplace_back(state.shared_from_this()); });
  return modules;
}

std::vector<Placement> FSDPModule::placements() const { return state_->mesh_info.placements(); }

const DeviceMesh& FSDPModule::mesh() const { return state_->mesh_info.mesh; }

}  // namespace fsdp
