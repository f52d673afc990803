#include "module/prepare.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/require.hpp"
#include "module/module_access.hpp"
#include "module/refuse_container.hpp"
#include "module/shared_memory.hpp"
#include "module/state/module_state.hpp"
#include "module/state/module_table.hpp"
#include "module/sync_states.hpp"
#include "module/ties.hpp"
#include "param/left_storage.hpp"
#include "root/edit/edit_group.hpp"
#include "root/find_param.hpp"

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
    const auto& context = *nested.state->root()->context();
    require(!context.has_started(),
            "fully_shard: '{}' has run a step as a root, so that a module around it can no longer be sharded; call fully_shard "
            "on all modules before the first forward",
            nested.path);
    require_state(!context.step().is_pinned(),
                  "fully_shard: '{}' shows full parameters (fsdp::FullParameters), so that a module around it cannot be "
                  "sharded; end that scope first",
                  nested.path);
  }
}

std::vector<Unit> checked_units(const std::vector<Module*>& modules, const MixedPrecisionPolicy& policy) {
  std::vector<Unit> units;
  for (auto* module : modules) units.push_back({module, "", module->weak_from_this()});
  for (const auto& unit : units)
    require(!policy.full_precision_in_eval || !unit.alive.expired(),
            "fully_shard: full_precision_in_eval (FSDP_USE_FULL_PREC_IN_EVAL=1) needs {} to be owned by a shared_ptr "
            "(make_shared, or a module holder), as its mode is read later",
            unit.module->name());
  return units;
}

/// Until a root names them.
std::string display_name(const std::vector<Module*>& modules) {
  return modules.size() == 1 ? modules[0]->name()
                             : fmt::format("{} and {} more", modules[0]->name(), modules.size() - 1);
}

bool replicates(const FullyShardOptions& options) {
  return !options.replicated_params.empty() || !options.replicated_modules.empty();
}

ShardRequest request_of(const FullyShardOptions& options, const ModuleState* like) {
  ShardRequest request{.options = options,
                       .mesh_info = like != nullptr ? like->request().mesh_info : own_mesh_info(options)};
  request.options.ignored_params.clear();  // which must not live on for the state
  request.options.ignored_modules.clear();
  request.options.replicated_params.clear();
  request.options.replicated_modules.clear();
  request.ignored_modules.assign(options.ignored_modules.begin(), options.ignored_modules.end());
  return request;
}

/// What one rank can do by itself: what is to be sharded, and where it goes.
void find_places(Prepared& prepared, const std::vector<Module*>& requested, const FullyShardOptions& options,
                 const ModuleState* like) {
  auto& [request, modules, units, walk, states, places, groups, owned, given_up] = prepared;
  check_options(options);
  modules = checked_modules(requested);
  walk = walk_modules(modules, options.ignored_params, options.ignored_modules, exempted_by(options.mp_policy));
  request.is_exempt =
      walk.is_exempt && std::ranges::all_of(modules, [&](const auto* module) { return walk.is_exempt(*module); });
  check_nested(walk);
  request.ignored = walk.ignored;
  states = collect_states(walk, request.mesh_info.mesh.device());
  units = checked_units(modules, options.mp_policy);
  claim_ties(states, modules, walk);
  places = like != nullptr
               ? targets_like(states, *like)
               : find_targets(states, request.mesh_info, options, replicated_params(modules, options, walk));
  refuse_shared_memory(states, places, options);
}

/// What the walk has found and the state knows already: parameters that are sharded, buffers that have been moved.
void leave_out_known(ModuleState& state, ModuleWalk& walk, ManagedStates& states) {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const auto& walked : walk.managed)
    if (state.watch().knows(*walked.module))
      for (const auto& buffer : walked.module->buffers(/*recurse=*/false)) known.insert(buffer.unsafeGetTensorImpl());
  std::erase_if(states.buffers,
                [&](const ManagedBuffer& buffer) { return known.contains(buffer.tensor.unsafeGetTensorImpl()); });
}

void ignore_sharded(ModuleWalk& walk) {
  for (const auto& walked : walk.managed)
    for (const auto& entry : ModuleAccess::parameters(*walked.module))
      if (find_param(entry.value())) walk.ignored.insert(entry.value().unsafeGetTensorImpl());
}

void find_late_places(Prepared& prepared, ModuleState& state) {
  const auto& request = prepared.request;
  prepared.walk = walk_again(prepared.modules, request);
  ignore_sharded(prepared.walk);
  prepared.states = collect_states(prepared.walk, request.mesh_info.mesh.device());
  leave_out_known(state, prepared.walk, prepared.states);
  prepared.places = find_targets(prepared.states, request.mesh_info, request.options, {});
  refuse_shared_memory(prepared.states, prepared.places, request.options);
}

/// The rest, with groups of ranks for what is replicated.
void prepare_groups(Prepared& prepared, const FullyShardOptions& options, const ModuleState* like) {
  const auto& own = prepared.request.mesh_info;
  replicate(prepared.places);
  prepared.groups = make_groups(prepared.states, prepared.places, own, display_name(prepared.modules), options, like);
  if (options.sync_from_rank0) check_source(prepared.states, prepared.groups, own);
}

using FindPlaces = std::function<void(Prepared&)>;

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
void prepare_together(Prepared& prepared, const FullyShardOptions& options, const ModuleState* like, const FindPlaces& find) {
  const auto& own = prepared.request.mesh_info;
  // Groups of ranks are made before a rank's own mistake can keep it from that.
  if (replicates(options)) static_cast<void>(replicate_beside(own));
  auto failure = failure_of([&] { find(prepared); });
  // A placement function may name meshes that what is replicated needs groups for: all ranks make them or none.
  if (replicates(options) && options.shard_placement_fn) agree_on_progress(own, failure);
  if (!failure) failure = failure_of([&] { prepare_groups(prepared, options, like); });
  agree_on_states(prepared.states, prepared.groups, own, failure);
}

std::vector<OwnedGroup> owned_groups(const Prepared& prepared) {
  std::vector<OwnedGroup> owned;
  for (const auto& made : prepared.groups) {
    auto& one = owned.emplace_back(made.group, made.mesh_info, made.suffix);
    for (const size_t i : made.params)
      one.params.push_back({prepared.states.params[i].name, prepared.states.params[i].unit});
  }
  return owned;
}

/// The parameters' first values, where the groups have not copied them from the modules.
void fill_values(const Prepared& prepared, const FullyShardOptions& options, const ModuleState* like) {
  if (options.sync_from_rank0) send_states(prepared.states, prepared.groups, prepared.request.mesh_info);
  for (const auto& made : prepared.groups) gather_tied(made.group->parts(), made.group->tied());
  // Those of the first rank are everybody's, and those of a copy follow.
  if (options.sync_from_rank0 || like != nullptr) return;
  for (const auto& made : prepared.groups) made.group->notes().note_first_values(made.group->parts());
}

/// Of each group that holds one of the tied parameters until now; their new memory is there together.
std::vector<Prepared::GivenUp> what_is_given_up(const std::vector<PreparedGroup>& groups) {
  std::vector<std::pair<std::shared_ptr<ParamGroup>, std::vector<size_t>>> leaving;
  for (const auto& made : groups)
    for (auto& tied : made.group->tied()) {
      const auto& piece = tied.from.group->parts().shard.piece(tied.from.index);
      if (piece.defined() && !keeper_of_memory(piece).empty()) tied.kept = piece;
      auto known = std::ranges::find(leaving, tied.from.group, [](const auto& entry) { return entry.first; });
      if (known == leaving.end()) known = leaving.insert(known, {tied.from.group, {}});
      known->second.push_back(tied.from.index);
    }
  std::vector<Prepared::GivenUp> all;
  for (auto& [group, params] : leaving) all.push_back({group, prepare_edit(*group, {.leaving = std::move(params)})});
  return all;
}

void complete(Prepared& prepared, const FullyShardOptions& options, const ModuleState* like, const FindPlaces& find) {
  if (options.sync_from_rank0) {
    prepare_together(prepared, options, like, find);
  } else {
    find(prepared);
    prepare_groups(prepared, options, like);
  }
  prepared.owned = owned_groups(prepared);
  check_reshard(prepared.owned, options.reshard_after_forward);
  plan_reshard(prepared.owned, options.reshard_after_forward);
  fill_values(prepared, options, like);
  prepared.given_up = what_is_given_up(prepared.groups);
}

}  // namespace

Prepared prepare(const std::vector<Module*>& modules, const FullyShardOptions& options, const ModuleState* like) {
  Prepared prepared{.request = request_of(options, like)};
  complete(prepared, options, like, [&](Prepared& found) { find_places(found, modules, options, like); });
  return prepared;
}

Prepared prepare_late(ModuleState& state) {
  Prepared prepared{.request = state.request(), .modules = state.watch().units()};
  if (prepared.modules.empty()) return prepared;
  complete(prepared, state.request().options, nullptr, [&](Prepared& found) { find_late_places(found, state); });
  return prepared;
}

}  // namespace fsdp
