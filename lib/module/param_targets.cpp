#include "module/param_targets.hpp"

#include "base/require.hpp"
#include "mesh/default_mesh.hpp"
#include "mesh/merged_mesh.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "module/state/module_table.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;
using Impls = std::unordered_set<const c10::TensorImpl*>;

/// The parameters of a subtree, without those of units that are sharded already.
void collect_subtree(Module& module, Impls& found) {
  if (find_state(module)) return;
  for (const auto& entry : ModuleAccess::parameters(module))
    if (entry.value().defined()) found.insert(entry.value().unsafeGetTensorImpl());
  for (const auto& child : module.named_children())
    if (child.value()) collect_subtree(*child.value(), found);
}

std::string name_in(const std::vector<Module*>& modules, const c10::TensorImpl* impl) {
  for (const auto* module : modules)
    for (const auto& param : module->named_parameters())
      if (param.value().unsafeGetTensorImpl() == impl) return param.key();
  return "a parameter";
}

/// The one cut of a parameter on a mesh, a mesh of the parameter's own, and what is beyond.
class Placer {
 public:
  Placer(const MeshInfo& own, const FullyShardOptions& options, const Impls& replicated)
      : own_(own), options_(options), replicated_(replicated) {}

  ParamTarget place(const ManagedParam& param) {
    if (param.tied) {
      require(!replicated_.contains(param.unsharded_param.unsafeGetTensorImpl()),
              "{}: cannot be replicated, as '{}' shards it already; name it in replicated_params of that earlier call of "
              "fully_shard",
              param.name, param.tied->group->name());
      return place_of(*param.tied);
    }
    ParamTarget result{.mesh_info = own_};
    std::optional<ShardPlacementResult> asked;
    if (options_.shard_placement_fn) asked = options_.shard_placement_fn(param.name, param.unsharded_param);
    if (asked) {
      result.dim = checked_dim(asked->placement, param);
      if (asked->mesh.defined()) result.mesh_info = info_of(asked->mesh, param);
    }
    set_spread(result, param, asked ? asked->differs_over : DeviceMesh());
    result.is_replicated = replicated_.contains(param.unsharded_param.unsafeGetTensorImpl());
    return result;
  }

 private:
  /// It stays where it is, and what an optimizer knows of it stays right.
  static ParamTarget place_of(const TiedSource& held) {
    const auto& layout = held.group->params()[held.index].layout();
    return {.mesh_info = held.group->identity().mesh_info,
            .dim = layout.is_flat() ? 0 : layout.dim(),
            .reach = held.group->params()[held.index].spec.reach};
  }

  static int64_t checked_dim(Shard shard, const ManagedParam& param) {
    const int64_t dims = std::max<int64_t>(param.unsharded_param.dim(), 1);
    require(shard.dim >= -dims && shard.dim < dims,
            "{}: shard_placement_fn gave Shard({}) for a parameter of {} dimension(s); expected one in [{}, {})",
            param.name, shard.dim, param.unsharded_param.dim(), -dims, dims);
    return shard.dim < 0 ? shard.dim + dims : shard.dim;
  }

  MeshInfo info_of(const DeviceMesh& mesh, const ManagedParam& param) {
    if (mesh == own_.mesh) return own_;
    for (const auto& known : others_)
      if (mesh == known.mesh) return known;
    require(mesh.device() == own_.mesh.device(), "{}: shard_placement_fn gave {}, which is on {}, but {} is on {}",
            param.name, mesh.to_string(), mesh.device().str(), own_.mesh.to_string(), own_.mesh.device().str());
    return others_.emplace_back(
        make_mesh_info(mesh, options_.replicate_only ? MeshUse::kReplicateOnly : MeshUse::kShard));
  }

  void set_spread(ParamTarget& place, const ManagedParam& param, const DeviceMesh& differs_over) const {
    std::optional<TensorParallel> said;
    if (options_.tensor_parallel_fn) said = options_.tensor_parallel_fn(param.name, param.unsharded_param);
    require(!said || !differs_over.defined(),
            "{}: both tensor_parallel_fn and differs_over of shard_placement_fn describe it; use tensor_parallel_fn alone",
            param.name);
    if (differs_over.defined()) place.reach.summed_over = groups_of(differs_over);
    const auto& info = place.mesh_info;
    if (!said) {
      // What dp_mesh_dims leaves unnamed is known, and holds the same everywhere.
      if (!info.whole.defined() || differs_over.defined()) return;
      said.emplace();
      said->placements.assign(static_cast<size_t>(info.others.ndim()), Replicate{});
      said->sizes = param.unsharded_param.sizes().vec();
    }
    const bool is_own = !said->mesh.defined() || (info.whole.defined() && said->mesh == info.others);
    require(!is_own || info.whole.defined(),
            "{}: tensor_parallel_fn names no mesh, and {} has no dimensions beside the data-parallel ones; name "
            "the tensor-parallel mesh, or give fully_shard the whole one with dp_mesh_dims",
            param.name, info.mesh.to_string());
    auto mesh = is_own ? info.others : said->mesh;
    auto whole = is_own ? info.whole : joined_mesh(info.mesh, mesh);
    auto part = make_tensor_part(param.unsharded_param, std::move(mesh), std::move(whole), std::move(said->placements),
                                 std::move(said->sizes), param.name);
    place.reach.summed_over = cut_over(part);
    place.reach.part = std::make_shared<const TensorPart>(std::move(part));
  }

  const MeshInfo& own_;
  const FullyShardOptions& options_;
  const Impls& replicated_;
  std::vector<MeshInfo> others_;
};

}  // namespace

MeshInfo own_mesh_info(const FullyShardOptions& options) {
  const auto mesh = options.mesh ? options.mesh : default_device_mesh();
  if (!options.dp_mesh_dims)
    return make_mesh_info(mesh, options.replicate_only ? MeshUse::kReplicateOnly : MeshUse::kShard);
  require(!options.replicate_only || options.dp_mesh_dims->shard.names.empty(),
          "fully_shard: replicate_only, but dp_mesh_dims names dimensions that shard; name them as replicate");
  return make_mesh_info(mesh, *options.dp_mesh_dims);
}

Impls replicated_params(const std::vector<Module*>& modules, const FullyShardOptions& options,
                        const ModuleWalk& walk) {
  Impls found;
  for (const auto& module : options.replicated_modules) {
    require(module != nullptr, "replicated_modules: expected modules, found a null pointer");
    collect_subtree(*module, found);
  }
  for (const auto& param : options.replicated_params) {
    require(param.defined(), "replicated_params: expected parameters, found an undefined tensor");
    found.insert(param.unsafeGetTensorImpl());
  }
  for (const auto* impl : found)
    if (walk.ignored.contains(impl))
      throw UsageError(fmt::format("{}: is to be replicated and to be ignored; name it in one of replicated_params "
                                   "(or replicated_modules) and ignored_params (or ignored_modules)",
                                   name_in(modules, impl)));
  return found;
}

std::vector<ParamTarget> find_targets(const ManagedStates& states, const MeshInfo& own,
                                     const FullyShardOptions& options, const Impls& replicated) {
  Placer placer(own, options, replicated);
  std::vector<ParamTarget> places;
  for (const auto& param : states.params) places.push_back(placer.place(param));
  return places;
}

void replicate(std::vector<ParamTarget>& places) {
  std::vector<MeshInfo> made;
  for (auto& place : places) {
    if (!place.is_replicated || place.mesh_info.use == MeshUse::kReplicateOnly) continue;
    const auto known = std::find_if(made.begin(), made.end(),
                                    [&](const MeshInfo& info) { return info.mesh == place.mesh_info.mesh; });
    place.mesh_info = known != made.end() ? *known : made.emplace_back(replicate_beside(place.mesh_info));
  }
}

std::vector<ParamTarget> targets_like(const ManagedStates& states, const ModuleState& like) {
  std::vector<ParamTarget> places;
  for (const auto& param : states.params) {
    const size_t before = places.size();
    for (const auto& owned : like.groups()) {
      const auto group = owned.group.lock();
      for (size_t i = 0; group && i < owned.params.size(); ++i) {
        if (places.size() > before || owned.params[i].name != param.name || owned.params[i].unit != param.unit)
          continue;
        const auto& layout = group->params()[i].layout();
        places.push_back({owned.mesh_info, layout.is_flat() ? 0 : layout.dim(), group->params()[i].spec.reach});
      }
    }
    // Tied, and a module around this one has it: that one's copy will take it over again.
    if (places.size() == before) places.push_back({.mesh_info = like.request().mesh_info});
  }
  return places;
}

std::string suffix_of(const MeshInfo& group, const MeshInfo& own) {
  std::vector<std::string> notes;
  if (!(group.mesh == own.mesh)) {
    const auto& names = group.mesh.dim_names();
    notes = names.empty() ? std::vector{fmt::format("{} ranks", group.mesh.size())} : names;
  }
  if (group.use != own.use) notes.push_back("replicated");
  return notes.empty() ? "" : fmt::format(" [{}]", fmt::join(notes, ", "));
}

}  // namespace fsdp
