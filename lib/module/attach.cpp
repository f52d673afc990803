#include "module/attach.hpp"

#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include "base/log.hpp"
#include "module/module_access.hpp"
#include "module/prepare.hpp"
#include "module/state/module_table.hpp"
#include "module/ties.hpp"

// What changes the modules. Nothing here fails: all that may has been done by `prepare`.
namespace fsdp {

namespace {

using torch::nn::Module;

/// ParameterList and ParameterDict hand out what their table holds.
bool reads_its_table(const Module& module) {
  return dynamic_cast<const torch::nn::ParameterListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterDictImpl*>(&module) != nullptr;
}

/// A tied parameter stays listed under its first name alone, so that no optimizer steps it
/// twice; LibTorch skips undefined entries. The modules' members go on sharing the unsharded parameter.
void replace_registrations(const ManagedStates& states, const PreparedGroup& prepared, OwnedGroup& owned) {
  auto& group = *prepared.group;
  for (size_t i = 0; i < prepared.params.size(); ++i) {
    const auto sharded_param = group.params()[i].sharded.hand_over();
    bool is_first = true;
    for (auto place : states.params[prepared.params[i]].registrations) {
      place.param = i;
      const bool is_listed = is_first || reads_its_table(*place.module);
      is_first = false;
      auto& entry = ModuleAccess::parameters(*place.module)[place.slot].value();
      entry = is_listed ? sharded_param : at::Tensor();
      if (is_listed)
        owned.registrations.push_back(std::move(place));
      else
        remember_tied_entry(place, prepared.group);
    }
  }
}

/// A root of its own, with the groups.
std::shared_ptr<RootContext> attach_groups(Prepared& prepared) {
  auto context = std::make_shared<RootContext>();
  for (size_t i = 0; i < prepared.groups.size(); ++i) {
    const auto& made = prepared.groups[i];
    GroupPort::of(*made.group).attach();
    replace_registrations(prepared.states, made, prepared.owned[i]);
    context->add(made.group);
  }
  return context;
}

void follow_modes(const std::shared_ptr<ModuleState>& state) {
  if (!state->precision().follows_modes()) return;
  for (const auto& group : state->live_groups())
    group->parts().eval_precision.follow([weak = std::weak_ptr(state)] {
      const auto alive = weak.lock();
      return alive && alive->precision().wants_own_dtype();
    });
}

}  // namespace

std::shared_ptr<ModuleState> attach(const std::vector<Module*>& requested, const FullyShardOptions& options,
                                    const ModuleState* like) {
  auto prepared = prepare(requested, options, like);
  const auto& info = prepared.request.mesh_info;
  const auto device = info.mesh.device();
  info_once("parameters() of a sharded module are DTensors: sizes, numel and grad mean the whole parameter; this rank's part is "
            "fsdp::to_local(parameter)");
  if (info.data_parallel_size() == 1) warn_once("one rank: nothing is communicated, copied or released");
  auto context = attach_groups(prepared);
  const auto state = std::make_shared<ModuleState>(std::move(prepared.request), std::move(prepared.units),
                                                   std::move(prepared.owned), std::move(prepared.states.shared),
                                                   std::move(context));
  follow_modes(state);
  state->precision().move_buffers(prepared.states.buffers, device);
  for (const auto& nested : prepared.walk.nested) state->adopt(nested);
  settle_ties(state);
  for (auto* module : prepared.modules) remember_state(*module, state);
  state->take_root();
  return state;
}

}  // namespace fsdp
