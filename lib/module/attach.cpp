#include "module/attach.hpp"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <typeinfo>

#include "base/log.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "module/make_groups.hpp"
#include "module/managed_states.hpp"
#include "module/module_access.hpp"
#include "module/module_table.hpp"
#include "module/module_walk.hpp"
#include "module/sync_states.hpp"
#include "module/ties.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

void check_module(Module& module) {
  refuse_container(module);
  require(find_state(module) == nullptr,
          "fully_shard: {} is sharded already; call fully_shard once per module", module.name());
}

std::vector<Module*> checked_modules(const std::vector<Module*>& modules) {
  require(!modules.empty(), "fully_shard: expected at least one module, found an empty list");
  std::vector<Module*> unique;
  for (auto* module : modules) {
    require(module != nullptr, "fully_shard: expected modules, found a null pointer");
    if (std::find(unique.begin(), unique.end(), module) != unique.end()) continue;
    check_module(*module);
    unique.push_back(module);
  }
  return unique;
}

void check_nested(const ModuleWalk& walk) {
  for (const auto& nested : walk.nested) {
    const auto root = nested.state->root();
    require(!root->context->has_started(),
            "fully_shard: the module around '{}' is to be sharded, but that one has run a step as "
            "a root already; call fully_shard on all modules before the first forward",
            nested.path);
    require_state(!root->context->steps_are_held(),
                  "fully_shard: the module around '{}' is to be sharded while that one shows full "
                  "parameters (fsdp::FullParameters); end that first",
                  nested.path);
  }
}

std::string display_name(const std::vector<Module*>& modules) {
  return modules.size() == 1 ? modules[0]->name()
                             : fmt::format("{} and {} more", modules[0]->name(), modules.size() - 1);
}

void move_buffers(const ManagedStates& states, c10::Device device, ModuleState& state) {
  torch::NoGradGuard no_grad;
  const auto dtype = state.mp_policy.buffer_dtype;
  for (const auto& buffer : states.buffers) {
    const auto to = buffer.is_meta() ? buffer.device() : device;
    const bool casts = dtype && at::isFloatingType(buffer.scalar_type());
    if (casts) state.cast_buffers.emplace_back(buffer);
    const auto type = casts ? *dtype : buffer.scalar_type();
    if (buffer.device() != to || buffer.scalar_type() != type) buffer.set_data(buffer.to(to, type));
  }
}

/// ParameterList and ParameterDict hand out what their table holds.
bool reads_its_table(const Module& module) {
  return dynamic_cast<const torch::nn::ParameterListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterDictImpl*>(&module) != nullptr;
}

/// A tied parameter stays listed under its first name alone (S6), so that no optimizer steps it
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
        remember_tied_entry(place, group.share());
    }
  }
}

void attach_group(const ManagedStates& states, const PreparedGroup& prepared, OwnedGroup& owned,
                  RootContext& context) {
  GroupPort::of(*prepared.group).attach();
  for (const size_t i : prepared.params) owned.params.push_back({states.params[i].name, states.params[i].unit});
  replace_registrations(states, prepared, owned);
  context.add(prepared.group);
}

/// What fully_shard is about to change; nothing has changed yet.
struct Prepared {
  std::vector<Module*> modules = {};
  ModuleWalk walk = {};
  ManagedStates states = {};
  std::vector<ParamPlace> places = {};     ///< of the states' parameters
  std::vector<PreparedGroup> groups = {};  ///< none if there is nothing to shard
  const ModuleState* like = nullptr;
};

bool replicates(const FullyShardOptions& options) {
  return !options.replicated_params.empty() || !options.replicated_modules.empty();
}

/// What one rank can do by itself: what is to be sharded, and where it goes.
void prepare_places(Prepared& prepared, const std::vector<Module*>& requested, ModuleState& state,
                    const FullyShardOptions& options) {
  auto& [modules, walk, states, places, groups, like] = prepared;
  check_options(options);
  modules = checked_modules(requested);
  walk = walk_modules(modules, options.ignored_params, options.ignored_modules);
  check_nested(walk);
  state.description = display_name(modules);
  state.ignored = walk.ignored;
  states = collect_states(walk, state.mesh_info.mesh.device());
  for (auto* module : modules) state.units.push_back({module, "", module->weak_from_this()});
  for (const auto& unit : state.units)
    require(!options.mp_policy.full_precision_in_eval || !unit.alive.expired(),
            "fully_shard: full_precision_in_eval needs {} to be owned by a shared_ptr (make_shared, or a module "
            "holder), as its mode is read later",
            unit.module->name());
  claim_ties(states, modules, walk);
  places = like != nullptr ? places_like(states, *like)
                           : place_params(states, state, options, replicated_params(modules, options, walk));
}

/// The rest, with groups of ranks for what is replicated.
void prepare_groups(Prepared& prepared, ModuleState& state, const FullyShardOptions& options) {
  replicate(prepared.places);
  prepared.groups = make_groups(prepared.states, prepared.places, state, options, prepared.like);
  if (options.sync_from_rank0) check_source(prepared.states, prepared.groups, state.mesh_info);
}

template <class Body>
std::exception_ptr failure_of(Body&& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// The same on all ranks or on none.
void prepare_together(Prepared& prepared, const std::vector<Module*>& requested, ModuleState& state,
                      const FullyShardOptions& options) {
  auto failure = failure_of([&] { prepare_places(prepared, requested, state, options); });
  // A placement function may name meshes that what is replicated needs groups for: all ranks make them or none.
  if (replicates(options) && options.shard_placement_fn) agree_on_progress(state.mesh_info, failure);
  if (!failure) failure = failure_of([&] { prepare_groups(prepared, state, options); });
  agree_on_states(prepared.states, prepared.groups, state.mesh_info, failure);
}

/// Puts the states that the walk met below the new one.
void adopt_nested(const std::shared_ptr<ModuleState>& state, const ModuleWalk& walk) {
  for (const auto& nested : walk.nested) {
    const auto root = nested.state->root();
    const bool is_ours = nested.state->parent.lock() == state;
    if (nested.state == root || is_ours)
      for (auto& unit : nested.state->units)
        if (unit.module == nested.module) unit.path = nested.path;
    if (root == state) continue;  // another of its units has brought it
    root->parent = state;
    state->nested.push_back(root);
  }
}

}  // namespace

void refuse_container(const Module& module) {
  const auto& type = typeid(module);
  const bool is_container =
      type == typeid(torch::nn::ModuleListImpl) || type == typeid(torch::nn::ModuleDictImpl) ||
      type == typeid(torch::nn::ParameterListImpl) || type == typeid(torch::nn::ParameterDictImpl);
  require(!is_container,
          "fully_shard: {} is a container without a forward of its own; call fully_shard on its "
          "elements, on the list of them, or on the module around it",
          module.name());
}

std::shared_ptr<ModuleState> attach(const std::vector<Module*>& requested,
                                    const FullyShardOptions& options, const ModuleState* like) {
  auto state = std::make_shared<ModuleState>();
  state->mesh_info = like != nullptr ? like->mesh_info : own_mesh_info(options);
  state->requested_reshard = options.reshard_after_forward;
  state->mp_policy = options.mp_policy;
  state->options = options;
  state->options.ignored_params.clear();  // which must not live on for the state
  state->options.ignored_modules.clear();
  state->options.replicated_params.clear();
  state->options.replicated_modules.clear();
  state->ignored_modules.assign(options.ignored_modules.begin(), options.ignored_modules.end());
  Prepared prepared{.like = like};
  // Groups of ranks are made before a rank's own mistake can keep it from that.
  if (options.sync_from_rank0 && replicates(options)) static_cast<void>(replicate_beside(state->mesh_info));
  if (options.sync_from_rank0) {
    prepare_together(prepared, requested, *state, options);
  } else {
    prepare_places(prepared, requested, *state, options);
    prepare_groups(prepared, *state, options);
  }
  const auto& [modules, walk, states, places, groups, as] = prepared;
  for (const auto& made : groups) state->groups.emplace_back(made.group, made.mesh_info, made.suffix);
  state->check_reshard(options.reshard_after_forward);
  for (auto& owned : state->groups)
    if (options.reshard_after_forward.is_integer())
      owned.integer_plan = state->plan_reshard(options.reshard_after_forward, owned.mesh_info);
  if (options.sync_from_rank0) send_states(states, groups, state->mesh_info);
  for (const auto& prepared_group : groups) prepared_group.group->gather_tied();
  // Those of the first rank are everybody's, and those of a copy follow.
  if (!options.sync_from_rank0 && like == nullptr)
    for (const auto& prepared_group : groups) prepared_group.group->note_first_values();

  // From here on the modules change, and nothing fails.
  if (state->mesh_info.data_parallel_size() == 1)
    warn_once("one rank: nothing is communicated, copied or released");
  state->context = std::make_shared<RootContext>();
  for (size_t i = 0; i < groups.size(); ++i) {
    attach_group(states, groups[i], state->groups[i], *state->context);
    if (options.mp_policy.full_precision_in_eval)
      groups[i].group->eval_precision().follow([weak = std::weak_ptr(state)] {
        const auto alive = weak.lock();
        return alive && alive->wants_own_dtype();
      });
  }
  move_buffers(states, state->mesh_info.mesh.device(), *state);
  adopt_nested(state, walk);
  state->shared_entries = states.shared;
  settle_ties(state);
  for (auto* module : modules) remember_state(*module, state);
  state->take_root();
  return state;
}

}  // namespace fsdp
