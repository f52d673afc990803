#include "module/attach.hpp"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <typeinfo>

#include "base/log.hpp"
#include "base/require.hpp"
#include "mesh/default_mesh.hpp"
#include "module/managed_states.hpp"
#include "module/module_access.hpp"
#include "module/module_table.hpp"
#include "module/module_walk.hpp"
#include "module/sync_states.hpp"
#include "param/residency.hpp"

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

/// The dtype that a parameter is gathered and computed in, and what its operators return.
void set_dtypes(GroupParam& result, const ManagedParam& param, const MixedPrecisionPolicy& policy) {
  const auto own = result.param_dtype = param.handle.scalar_type();
  if (!at::isFloatingType(own)) return;
  require(!policy.param_dtype || at::isFloatingType(*policy.param_dtype),
          "{}: mp_policy.param_dtype is {}; expected a floating-point dtype", param.name,
          c10::toString(policy.param_dtype.value_or(own)));
  if (policy.is_exempt && policy.is_exempt(*param.registrations.front().module)) {
    result.output_dtype = policy.param_dtype;
    return;
  }
  auto asked = policy.param_dtype;
  if (policy.param_dtype_override)
    if (const auto other = policy.param_dtype_override(param.name, param.handle)) asked = other;
  result.param_dtype = asked.value_or(own);
  result.has_param_dtype = asked.has_value();
  require(at::isFloatingType(result.param_dtype),
          "{}: mp_policy.param_dtype_override gave {}; expected a floating-point dtype", param.name,
          c10::toString(result.param_dtype));
}

void check_layout(const FullyShardOptions& options) {
  const bool is_flat = options.layout == ParamLayout::kFlat;
  require(!is_flat || !options.shard_placement_fn,
          "fully_shard: the flat layout cuts no dimension; leave shard_placement_fn out, or use "
          "ParamLayout::kPerParameter");
  require(is_flat || !options.flat_block_numel,
          "fully_shard: flat_block_numel is for the flat layout; use shard_placement_fn, or ParamLayout::kFlat");
}

/// Where a parameter may be cut (P2, P3).
void set_cut(GroupParam& result, const FullyShardOptions& options) {
  const auto& handle = result.handle;
  if (options.flat_block_numel) result.block_numel = options.flat_block_numel(result.name, handle);
  require(result.block_numel >= 1, "{}: flat_block_numel gave {}; expected 1 element or more", result.name,
          result.block_numel);
  if (!options.shard_placement_fn) return;
  const auto placement = options.shard_placement_fn(result.name, handle);
  if (!placement) return;
  const int64_t dims = std::max<int64_t>(handle.dim(), 1);
  require(placement->dim >= -dims && placement->dim < dims,
          "{}: shard_placement_fn gave Shard({}) for a parameter of {} dimension(s); expected one in [{}, {})",
          result.name, placement->dim, handle.dim(), -dims, dims);
  result.dim = placement->dim < 0 ? placement->dim + dims : placement->dim;
}

GroupParam group_param(const ManagedParam& param, const FullyShardOptions& options) {
  GroupParam result{.name = param.name, .handle = param.handle, .param_dtype = at::kFloat};
  set_dtypes(result, param, options.mp_policy);
  set_cut(result, options);
  return result;
}

/// The group, complete but not attached: the modules are as they were.
std::shared_ptr<ParamGroup> make_group(const ManagedStates& states, const ModuleState& state,
                                       const FullyShardOptions& options, const ParamGroup* cut_like) {
  std::vector<GroupParam> params;
  for (const auto& param : states.params) params.push_back(group_param(param, options));
  // The values come from the first rank, so it does not matter whether there are any here.
  const bool on_meta = !options.sync_from_rank0 &&
                       std::all_of(params.begin(), params.end(),
                                   [](const auto& param) { return param.handle.is_meta(); });
  for (const auto& param : params)
    require(options.sync_from_rank0 || param.handle.is_meta() == on_meta,
            "{}: is on {}, but '{}' of the same group is on {}; materialise all parameters before "
            "fully_shard, or none",
            param.name, param.handle.device().str(), params.front().name,
            params.front().handle.device().str());
  GroupConfig config{.name = state.description,
                     .mesh_info = state.mesh_info,
                     .device = on_meta ? c10::Device(at::kMeta) : state.mesh_info.mesh.device(),
                     .mp_policy = options.mp_policy,
                     .layout = options.layout,
                     .throws_outside_step =
                         options.fault_outside_step == FaultOutsideStep::kThrow,
                     .warn_after_reductions = options.warn_after_unused_gradients};
  if (cut_like != nullptr) config.cut_like = cut_like->layout();
  return std::make_shared<ParamGroup>(std::move(config), params);
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
/// twice; LibTorch skips undefined entries. The modules' members go on sharing the handle.
void replace_registrations(const ManagedStates& states, ParamGroup& group, ModuleState& state) {
  for (size_t i = 0; i < states.params.size(); ++i) {
    const auto registered = group.params()[i].hand_over_registered();
    const auto& places = states.params[i].registrations;
    for (const auto& place : places) {
      const bool is_listed = &place == &places.front() || reads_its_table(*place.module);
      auto& entry = ModuleAccess::parameters(*place.module)[place.slot].value();
      entry = is_listed ? registered : at::Tensor();
      if (is_listed)
        state.registrations.push_back(place);
      else
        remember_tied_entry(place, group.shared_from_this());
    }
  }
}

/// What fully_shard is about to change; nothing has changed yet.
struct Prepared {
  std::vector<Module*> modules = {};
  ModuleWalk walk = {};
  ManagedStates states = {};
  std::shared_ptr<ParamGroup> group = {};  ///< none if there is nothing to shard
  const ParamGroup* cut_like = nullptr;
};

/// Everything that one rank can do by itself, and all of its checks.
void prepare(Prepared& prepared, const std::vector<Module*>& requested, ModuleState& state,
             const FullyShardOptions& options) {
  auto& [modules, walk, states, group, cut_like] = prepared;
  check_layout(options);
  modules = checked_modules(requested);
  walk = walk_modules(modules, options.ignored_params, options.ignored_modules);
  check_nested(walk);
  state.description = display_name(modules);
  state.ignored = walk.ignored;
  states = collect_states(walk, state.mesh_info.mesh.device());
  for (auto* module : modules) state.units.push_back({module, ""});
  for (const auto& param : states.params) {
    state.param_names.push_back(param.name);
    state.param_units.push_back(param.unit);
  }
  if (options.sync_from_rank0) check_source(states, state.mesh_info);
  if (!states.params.empty()) group = make_group(states, state, options, cut_like);
}

/// The same on all ranks or on none.
void prepare_together(Prepared& prepared, const std::vector<Module*>& requested, ModuleState& state,
                      const FullyShardOptions& options) {
  std::exception_ptr failure;
  try {
    prepare(prepared, requested, state, options);
  } catch (...) {
    failure = std::current_exception();
  }
  agree_on_states(prepared.states, state.mesh_info, failure);
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
                                    const FullyShardOptions& options, const ParamGroup* cut_like) {
  auto state = std::make_shared<ModuleState>();
  const auto mesh = options.mesh ? options.mesh : default_device_mesh();
  state->mesh_info = make_mesh_info(
      mesh, options.replicate_only ? MeshUse::kReplicateOnly : MeshUse::kShard);
  state->requested_reshard = options.reshard_after_forward;
  state->mp_policy = options.mp_policy;
  state->options = options;
  state->options.ignored_params.clear();  // which must not live on for the state
  state->options.ignored_modules.clear();
  state->ignored_modules.assign(options.ignored_modules.begin(), options.ignored_modules.end());
  Prepared prepared{.cut_like = cut_like};
  if (options.sync_from_rank0)
    prepare_together(prepared, requested, *state, options);
  else
    prepare(prepared, requested, *state, options);
  const auto& [modules, walk, states, group, like] = prepared;
  if (options.reshard_after_forward.is_integer())
    state->integer_plan = state->plan_reshard(options.reshard_after_forward);
  if (options.sync_from_rank0) send_states(states, group.get(), state->mesh_info);

  // From here on the modules change, and nothing fails.
  if (state->mesh_info.data_parallel_size() == 1)
    info_once("one rank: nothing is communicated, copied or released");
  state->context = std::make_shared<RootContext>();
  state->group = group;
  if (group) {
    group->attach();
    replace_registrations(states, *group, *state);
    state->context->add(group);
  }
  move_buffers(states, mesh.device(), *state);
  adopt_nested(state, walk);
  for (auto* module : modules) remember_state(*module, state);
  state->take_root();
  return state;
}

}  // namespace fsdp
