#include "module/attach.hpp"

#include <algorithm>

#include "base/environment.hpp"
#include "base/log.hpp"
#include "group/notes/frozen_mixture.hpp"
#include "module/module_access.hpp"
#include "module/prepare.hpp"
#include "module/shows_own_parameters.hpp"
#include "module/state/module_table.hpp"
#include "module/ties.hpp"
#include "root/edit/edit_group.hpp"
#include "root/find_param.hpp"

// What changes the modules. Nothing here fails: all that may has been done by `prepare`.
namespace fsdp {

namespace {

using torch::nn::Module;

/// A tied parameter stays listed in each of its places, as before: LibTorch's programs find it under any of its names, and
/// its optimizers step it as often. The modules' members go on sharing the unsharded parameter.
void replace_registrations(const ManagedStates& states, const PreparedGroup& prepared, OwnedGroup& owned) {
  auto& group = *prepared.group;
  for (size_t i = 0; i < prepared.params.size(); ++i) {
    const auto sharded_param = group.params()[i].sharded.hand_over();
    for (auto place : states.params[prepared.params[i]].registrations) {
      place.param = i;
      ModuleAccess::parameters(*place.module)[place.slot].value() = sharded_param;
      owned.registrations.push_back(std::move(place));
    }
  }
}

/// A root of its own, with the groups.
std::shared_ptr<RootContext> attach_groups(Prepared& prepared) {
  auto context = std::make_shared<RootContext>();
  for (auto& [group, given_up] : prepared.given_up) edit(*group, std::move(given_up));
  for (size_t i = 0; i < prepared.groups.size(); ++i) {
    const auto& made = prepared.groups[i];
    GroupPort::of(*made.group).attach();
    replace_registrations(prepared.states, made, prepared.owned[i]);
    context->add(made.group);
  }
  return context;
}

FullyShardOptions with_environment(FullyShardOptions options) {
  auto& policy = options.mp_policy;
  const bool casts = policy.param_dtype || policy.param_dtype_override || policy.buffer_dtype;
  policy.full_precision_in_eval |= casts && environment::computes_in_full_precision_in_eval();
  return options;
}

/// To the device, and in the policy's dtype where it is not exempt from that.
void move_buffers(const ManagedStates& states, ModuleState& state, c10::Device device) {
  std::vector<at::Tensor> exempt, others;
  for (const auto& buffer : states.buffers) (buffer.is_exempt ? exempt : others).push_back(buffer.tensor);
  ModulePrecision(MixedPrecisionPolicy(), {}).move_buffers(exempt, device);
  state.precision().move_buffers(others, device);
}

/// Python changes no mirrors of its modules.
bool may_change(const std::vector<WalkedModule>& modules) {
  return std::ranges::none_of(modules, [](const WalkedModule& walked) {
    return dynamic_cast<const ShowsOwnParameters*>(walked.module) != nullptr;
  });
}

/// Entries that were registered since with the tensor that a member holds of a sharded parameter: one more of its places.
void take_over_ties(const std::vector<WalkedModule>& modules) {
  for (const auto& walked : modules) {
    auto& table = ModuleAccess::parameters(*walked.module);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      const auto found = find_param(table[slot].value());
      if (!found || !found->is_unsharded_param) continue;
      const auto owner = ModuleState::of(*found->group);
      if (!owner) continue;
      auto place = registration_at(*walked.module, slot);
      place.param = found->index;
      owner->add_registration(*found->group, std::move(place));
      table[slot].value() = found->param().sharded_param();
      warn_once(
          fmt::format("'{}' was registered after fully_shard with the tensor of '{}', and is one parameter with it from "
                      "now on. An optimizer that was built in between steps two: register it before fully_shard, or register "
                      "what parameters() gives for it",
                      table[slot].key(), found->param().name()));
    }
  }
}

void say_what_came_late(const ManagedStates& states, const ModuleState& state) {
  std::vector<std::string> names;
  for (const auto& param : states.params) names.push_back(param.name);
  if (!names.empty())
    info_once(fmt::format("'{}': {} came after fully_shard, and is sharded from now on, in a group more",
                          state.tree().description(), listed(names)));
}

}  // namespace

std::shared_ptr<ModuleState> attach(const std::vector<Module*>& requested, const FullyShardOptions& options,
                                    const ModuleState* like) {
  auto prepared = prepare(requested, with_environment(options), like);
  const auto& info = prepared.request.mesh_info;
  const auto device = info.mesh.device();
  info_once(
      "parameters() of a sharded module are DTensors: sizes, numel and grad mean the whole parameter; this rank's part is "
      "fsdp::to_local(parameter)");
  if (info.data_parallel_size() == 1) warn_once("one rank: nothing is communicated, copied or released");
  auto context = attach_groups(prepared);
  const auto state = std::make_shared<ModuleState>(std::move(prepared.request), std::move(prepared.units),
                                                   std::move(prepared.owned), std::move(prepared.states.shared),
                                                   std::move(context));
  move_buffers(prepared.states, *state, device);
  for (const auto& nested : prepared.walk.nested) state->adopt(nested);
  settle_ties(state);
  for (auto* module : prepared.modules) remember_state(*module, state);
  state->take_root();
  if (may_change(prepared.walk.managed)) state->watch().look(prepared.walk.managed);
  return state;
}

void attach_late(const std::shared_ptr<ModuleState>& state) {
  auto prepared = prepare_late(*state);
  for (size_t i = 0; i < prepared.groups.size(); ++i) {
    const auto& made = prepared.groups[i];
    GroupPort::of(*made.group).attach();
    made.group->notes().put_off();
    replace_registrations(prepared.states, made, prepared.owned[i]);
  }
  take_over_ties(prepared.walk.managed);
  say_what_came_late(prepared.states, *state);
  state->add_groups(std::move(prepared.owned));
  for (auto* module : prepared.modules) remember_state(*module, state);
  move_buffers(prepared.states, *state, state->request().mesh_info.mesh.device());
  state->watch().look(prepared.walk.managed);
}

}  // namespace fsdp
