#include "module/make_groups.hpp"

#include "base/environment.hpp"
#include "base/require.hpp"
#include "group/group_sanitizer.hpp"
#include "module/shows_own_parameters.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// The dtype that a parameter is gathered and computed in, and what its operators return.
void set_dtypes(GroupParam& result, const ManagedParam& param, const MixedPrecisionPolicy& policy) {
  const auto own = result.param_dtype = result.dtype();
  if (!at::isFloatingType(own)) return;
  require(!policy.param_dtype || at::isFloatingType(*policy.param_dtype),
          "{}: mp_policy.param_dtype is {}; expected a floating-point dtype", param.name,
          c10::toString(policy.param_dtype.value_or(own)));
  if (param.is_exempt) {
    result.output_dtype = policy.param_dtype;
    return;
  }
  auto asked = policy.param_dtype;
  if (policy.param_dtype_override)
    if (const auto other = policy.param_dtype_override(param.name, param.unsharded_param)) asked = other;
  result.param_dtype = asked.value_or(own);
  result.has_param_dtype = asked.has_value();
  require(at::isFloatingType(result.param_dtype),
          "{}: mp_policy.param_dtype_override gave {}; expected a floating-point dtype", param.name,
          c10::toString(result.param_dtype));
}

GroupParam group_param(const ManagedParam& param, const ParamTarget& place, const FullyShardOptions& options) {
  GroupParam result{.name = param.name,
                    .unsharded_param = param.unsharded_param,
                    .param_dtype = at::kFloat,
                    .dim = place.dim,
                    .reach = place.reach,
                    .tied = param.tied,
                    .is_dtensor = dynamic_cast<const ShowsOwnParameters*>(param.registrations.front().module) == nullptr};
  set_dtypes(result, param, options.mp_policy);
  if (options.flat_block_numel) result.block_numel = options.flat_block_numel(result.name, result.unsharded_param);
  require(result.block_numel >= 1, "{}: flat_block_numel gave {}; expected 1 element or more", result.name,
          result.block_numel);
  if (options.all_gather_extension_fn) result.extension = options.all_gather_extension_fn(result.name, result.unsharded_param);
  return result;
}

std::shared_ptr<ParamGroup> make_group(const PreparedGroup& prepared, const std::vector<GroupParam>& params,
                                       const std::string& name, const FullyShardOptions& options,
                                       const ParamGroup* cut_like) {
  // The values come from the first rank, so it does not matter whether there are any here.
  const bool on_meta = !options.sync_from_rank0 &&
                       std::all_of(params.begin(), params.end(),
                                   [](const auto& param) { return param.unsharded_param.is_meta(); });
  for (const auto& param : params)
    require(options.sync_from_rank0 || param.unsharded_param.is_meta() == on_meta,
            "{}: is on {}, but '{}' of the same group is on {}; materialise all parameters before "
            "fully_shard, or none",
            param.name, param.unsharded_param.device().str(), params.front().name,
            params.front().unsharded_param.device().str());
  const auto& info = prepared.mesh_info;
  const bool is_beside = info.use == MeshUse::kReplicateBeside;
  GroupConfig config{.device = on_meta ? c10::Device(at::kMeta) : info.mesh.device(),
                     .mp_policy = options.mp_policy,
                     .layout = is_beside ? ParamLayout::kPerParameter : options.layout,
                     .throws_outside_step =
                         options.fault_outside_step == FaultOutsideStep::kThrow,
                     .warn_after_reductions = options.warn_after_unused_gradients,
                     .sanitizer = options.sanitizer ? options.sanitizer : sanitizer_of_environment()};
  if (config.sanitizer && !config.sanitizer->is_enabled) config.sanitizer.reset();
  if (options.offload_policy && (!info.mesh.device().is_cpu() || environment::copies_on_cpu()))
    config.host_memory = HostMemory{.is_pinned = options.offload_policy->pin_memory && !info.mesh.device().is_cpu()};
  if (cut_like != nullptr) config.cut_like = cut_like->parts().layout;
  return make_group(GroupIdentity{.name = name + prepared.suffix, .mesh_info = info}, std::move(config),
                                      params);
}

/// The group that a copy of it is to be cut like; null where it has given up parameters, or taken others
/// over, and so has no cut to follow for these.
std::shared_ptr<ParamGroup> cut_to_follow(const ModuleState* like, const MeshInfo& info,
                                          const std::vector<GroupParam>& params) {
  auto group = like != nullptr ? find_group(like->groups(), info) : nullptr;
  if (!group || group->params().size() != params.size()) return nullptr;
  for (size_t i = 0; i < params.size(); ++i)
    if (group->params()[i].has_moved_away ||
        params[i].unsharded_param.sizes() != c10::IntArrayRef(group->params()[i].spec.sizes()))
      return nullptr;
  return group;
}

/// Parameters of one mesh and one use of it go together.
std::vector<PreparedGroup> partition(const std::vector<ParamTarget>& places, const MeshInfo& own) {
  std::vector<PreparedGroup> groups;
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& info = places[i].mesh_info;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const PreparedGroup& known) {
      return known.mesh_info.mesh == info.mesh && known.mesh_info.use == info.use;
    });
    if (group == groups.end()) {
      auto suffix = suffix_of(info, own);
      // Meshes of other ranks may have the same names.
      const auto same = std::count_if(groups.begin(), groups.end(),
                                      [&](const PreparedGroup& known) { return known.suffix.starts_with(suffix); });
      if (!suffix.empty() && same > 0) suffix += fmt::format(" {}", same + 1);
      group = groups.insert(groups.end(), {.mesh_info = info, .suffix = std::move(suffix)});
    }
    group->params.push_back(i);
  }
  return groups;
}

}  // namespace

void check_options(const FullyShardOptions& options) {
  const bool is_flat = options.layout == ParamLayout::kFlat;
  require(!is_flat || !options.shard_placement_fn,
          "fully_shard: the flat layout cuts no dimension; leave shard_placement_fn out, or use "
          "ParamLayout::kPerParameter");
  require(is_flat || !options.flat_block_numel,
          "fully_shard: flat_block_numel is for the flat layout; use shard_placement_fn, or ParamLayout::kFlat");
}

std::vector<PreparedGroup> make_groups(const ManagedStates& states, const std::vector<ParamTarget>& places,
                                       const MeshInfo& own, const std::string& name,
                                       const FullyShardOptions& options, const ModuleState* like) {
  auto groups = partition(places, own);
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<GroupParam> params;
    for (const size_t i : groups[g].params) params.push_back(group_param(states.params[i], places[i], options));
    groups[g].group = make_group(groups[g], params, name, options,
                                 cut_to_follow(like, groups[g].mesh_info, params).get());
  }
  return groups;
}

}  // namespace fsdp
