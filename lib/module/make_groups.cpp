#include "module/make_groups.hpp"

#include "base/require.hpp"
#include "group/group_sanitizer.hpp"

namespace fsdp {

namespace {

/// The dtype that a parameter is gathered and computed in, and what its operators return.
void set_dtypes(GroupParam& result, const ManagedParam& param, const MixedPrecisionPolicy& policy) {
  const auto own = result.param_dtype = result.dtype();
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

/// Where a parameter may be cut (P2, P3).
void set_cut(GroupParam& result, const FullyShardOptions& options) {
  const auto& handle = result.handle;
  if (options.flat_block_numel) result.block_numel = options.flat_block_numel(result.name, handle);
  require(result.block_numel >= 1, "{}: flat_block_numel gave {}; expected 1 element or more", result.name,
          result.block_numel);
  if (result.held && options.layout == ParamLayout::kPerParameter) {
    // Its rows stay where they are, and what an optimizer knows of them stays right.
    const auto& layout = result.held->group->params()[result.held->index].layout();
    if (!layout.is_flat()) {
      result.dim = layout.dim();
      return;
    }
  }
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
  GroupParam result{.name = param.name, .handle = param.handle, .param_dtype = at::kFloat, .held = param.held};
  set_dtypes(result, param, options.mp_policy);
  set_cut(result, options);
  if (options.all_gather_extension_fn) result.extension = options.all_gather_extension_fn(result.name, result.handle);
  return result;
}

std::shared_ptr<ParamGroup> make_group(const PreparedGroup& prepared, const ManagedStates& states,
                                       const std::string& name, const FullyShardOptions& options,
                                       const ParamGroup* cut_like) {
  std::vector<GroupParam> params;
  for (const size_t i : prepared.params) params.push_back(group_param(states.params[i], options));
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
  const auto& info = prepared.mesh_info;
  GroupConfig config{.name = name,
                     .mesh_info = info,
                     .device = on_meta ? c10::Device(at::kMeta) : info.mesh.device(),
                     .mp_policy = options.mp_policy,
                     .layout = options.layout,
                     .throws_outside_step =
                         options.fault_outside_step == FaultOutsideStep::kThrow,
                     .warn_after_reductions = options.warn_after_unused_gradients,
                     .sanitizer = options.sanitizer ? options.sanitizer : sanitizer_of_environment()};
  if (config.sanitizer && !config.sanitizer->is_enabled) config.sanitizer.reset();
  if (cut_like != nullptr) config.cut_like = cut_like->layout();
  return std::make_shared<ParamGroup>(std::move(config), params);
}

/// Parameters that it gave up have left no cut to follow.
bool has_vacant(const ParamGroup& group) {
  return std::any_of(group.params().begin(), group.params().end(),
                     [](const ShardedParam& param) { return param.is_vacant(); });
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

std::vector<PreparedGroup> make_groups(const ManagedStates& states, const ModuleState& state,
                                       const FullyShardOptions& options, const ModuleState* like) {
  if (states.params.empty()) return {};
  std::vector<PreparedGroup> groups(1, {.mesh_info = state.mesh_info});
  for (size_t i = 0; i < states.params.size(); ++i) groups.front().params.push_back(i);
  const auto known = like != nullptr ? like->live_groups() : std::vector<std::shared_ptr<ParamGroup>>();
  for (size_t i = 0; i < groups.size(); ++i)
    groups[i].group = make_group(groups[i], states, state.description, options,
                                 i < known.size() && !has_vacant(*known[i]) ? known[i].get() : nullptr);
  return groups;
}

}  // namespace fsdp
