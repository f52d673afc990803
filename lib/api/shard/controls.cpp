#include "api/shard/controlled_groups.hpp"
#include "base/require.hpp"
#include "module/handles.hpp"
#include "root/configure.hpp"
#include "root/sanitizer_faults.hpp"

// The controls of a sharded module. Without parameters to shard every one of them does nothing.
namespace fsdp {

namespace {

template <class Action>
void for_groups(ModuleState& state, Recurse recurse, Action&& action) {
  for (const auto& group : controlled_groups(state, recurse)) action(*group);
}

/// The module's own groups.
template <class Action>
void for_own(ModuleState& state, Action&& action) {
  for_groups(state, Recurse::kNo, action);
}

/// change(GroupOptions&) -> void.
template <class Change>
void configure_groups(ModuleState& state, Recurse recurse, Change&& change) {
  for_groups(state, recurse, [&](ParamGroup& group) { configure(group, change); });
}

std::vector<std::weak_ptr<ParamGroup>> groups_of(const std::vector<FSDPModule>& modules) {
  std::vector<std::weak_ptr<ParamGroup>> groups;
  for (const auto& module : modules)
    for (const auto& owned : handles::state(module).groups()) groups.push_back(owned.group);
  return groups;
}

}  // namespace

void UnshardHandle::wait() {
  if (!state_) return;
  for_own(*state_, [&](ParamGroup& group) { state_->context()->control(group, GroupEvent::kUserWaits); });
  state_.reset();
}

void FSDPModule::unshard() {
  for_own(*state_, [&](ParamGroup& group) { state_->context()->control(group, GroupEvent::kUserUnshards); });
  for_own(*state_, [&](ParamGroup& group) { state_->context()->control(group, GroupEvent::kUserWaits); });
}

UnshardHandle FSDPModule::unshard_async() {
  for_own(*state_, [&](ParamGroup& group) { state_->context()->control(group, GroupEvent::kUserUnshards); });
  return handles::unshard(state_);
}

void FSDPModule::reshard() {
  for_own(*state_, [&](ParamGroup& group) { state_->context()->control(group, GroupEvent::kUserReshards); });
  fsdp::throw_faults(*state_->context());
}

void FSDPModule::set_requires_gradient_sync(bool value, Recurse recurse) {
  // Both parts of the reduction, as in FSDP2: what set_requires_all_reduce said before is over.
  configure_groups(*state_, recurse, [&](GroupOptions& options) {
    options.reduce.requires_gradient_sync = options.reduce.requires_all_reduce = value;
  });
}

void FSDPModule::set_requires_all_reduce(bool value, Recurse recurse) {
  configure_groups(*state_, recurse, [&](GroupOptions& options) { options.reduce.requires_all_reduce = value; });
}

void FSDPModule::set_is_last_backward(bool value) {
  configure(*state_->context(), [&](RootContext::Options& options) { options.is_last_backward = value; });
}

void FSDPModule::set_reshard_after_forward(ReshardAfterForward value, Recurse recurse) {
  const auto check = [&](const ModuleState& state) { check_reshard(state.groups(), value); };
  const auto apply = [&](ModuleState& state) { state.set_reshard_after_forward(value); };
  if (recurse == Recurse::kNo) {
    check(*state_);
    return apply(*state_);
  }
  state_->visit(check);
  state_->visit(apply);
}

void FSDPModule::set_reshard_after_backward(bool value, Recurse recurse) {
  configure_groups(*state_, recurse, [&](GroupOptions& options) { options.residency.reshard_after_backward = value; });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  configure_groups(*state_, Recurse::kNo,
                   [&](GroupOptions& options) { options.residency.forward_prefetch = groups_of(modules); });
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  configure_groups(*state_, Recurse::kNo,
                   [&](GroupOptions& options) { options.residency.backward_prefetch = groups_of(modules); });
}

void FSDPModule::set_prefetch_distance(int groups) {
  require(groups >= 0, "set_prefetch_distance: expected 0 or more groups, found {}", groups);
  configure(root_context(*state_, "set_prefetch_distance"),
            [&](RootContext::Options& options) { options.schedule.prefetch_distance = groups; });
}

void FSDPModule::set_reduce_scatter_start(ReduceScatterStart start) {
  configure(root_context(*state_, "set_reduce_scatter_start"),
            [&](RootContext::Options& options) { options.schedule.reduce_scatter_start = start; });
}

void FSDPModule::set_unsharded_byte_budget(std::optional<int64_t> bytes) {
  auto& context = root_context(*state_, "set_unsharded_byte_budget");
  std::lock_guard lock(context.mutex());
  int64_t largest = 0;
  for (const auto* group : context.runner().groups())
    if (!group->parts().is_never_released()) largest = std::max(largest, group->parts().unsharded_bytes());
  require(!bytes || *bytes >= largest,
          "set_unsharded_byte_budget: expected {} bytes or more, the size of the largest group, found {}",
          largest, bytes.value_or(0));
  configure(context, [&](RootContext::Options& options) { options.schedule.unsharded_byte_budget = bytes; });
}

void set_gradient_divide_factor(ModuleState& state, double factor, Recurse recurse) {
  require(factor > 0, "set_gradient_divide_factor: expected a factor above 0, found {}", factor);
  configure_groups(state, recurse, [&](GroupOptions& options) { options.reduce.divide_factor = factor; });
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  fsdp::set_gradient_divide_factor(*state_, factor, Recurse::kYes);
}

void set_force_sum_reduction_for_comms(ModuleState& state, bool value, Recurse recurse) {
  configure_groups(state, recurse, [&](GroupOptions& options) { options.reduce.forces_sum = value; });
}

void FSDPModule::set_force_sum_reduction_for_comms(bool value) {
  fsdp::set_force_sum_reduction_for_comms(*state_, value, Recurse::kYes);
}

void FSDPModule::set_unshard_in_backward(bool value) {
  configure_groups(*state_, Recurse::kNo, [&](GroupOptions& options) { options.residency.prefetch_in_backward = value; });
}

void set_reduce_scatter_unused_params(ModuleState& state, bool value, Recurse recurse) {
  configure_groups(state, recurse, [&](GroupOptions& options) { options.reduce.reduces_unused_params = value; });
}

void FSDPModule::set_reduce_scatter_unused_params(bool value) {
  fsdp::set_reduce_scatter_unused_params(*state_, value, Recurse::kYes);
}

void FSDPModule::reset_iter_state() {
  root_context(*state_, "reset_iter_state").reset_iter_state();
}

bool FSDPModule::is_root() const { return state_->tree().is_root(); }

bool FSDPModule::is_unsharded() const {
  const auto groups = state_->live_groups();
  return std::all_of(groups.begin(), groups.end(),
                     [](const auto& group) { return fsdp::is_unsharded(group->unsharder().state()); });
}

const std::string& FSDPModule::name() const { return state_->tree().name(); }

std::vector<FSDPModule> FSDPModule::sharded_modules() const {
  std::vector<FSDPModule> modules;
  state_->visit([&](ModuleState& state) { modules.push_back(handles::module(state.shared_from_this())); });
  return modules;
}

std::vector<Placement> FSDPModule::placements() const { return state_->request().mesh_info.placements(); }

const DeviceMesh& FSDPModule::mesh() const { return state_->request().mesh_info.mesh; }

}  // namespace fsdp
