#include "fsdp/fsdp1.hpp"

#include "base/require.hpp"
#include "fsdp/process_group.hpp"
#include "mesh/default_mesh.hpp"
#include "module/module_path.hpp"

namespace fsdp {

namespace {

const char* name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::kFullShard:
      return "FULL_SHARD";
    case ShardingStrategy::kShardGradOp:
      return "SHARD_GRAD_OP";
    case ShardingStrategy::kNoShard:
      return "NO_SHARD";
    case ShardingStrategy::kHybridShard:
      return "HYBRID_SHARD";
    case ShardingStrategy::kHybridShardZero2:
      return "_HYBRID_SHARD_ZERO2";
  }
  throw UsageError(
      fmt::format("from_fsdp1: expected a ShardingStrategy, found {}", static_cast<int>(strategy)));
}

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kHybridShard ||
         strategy == ShardingStrategy::kHybridShardZero2;
}

bool keeps_after_forward(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kShardGradOp ||
         strategy == ShardingStrategy::kHybridShardZero2;
}

void check_mesh(const DeviceMesh& mesh, ShardingStrategy strategy) {
  const int wanted = is_hybrid(strategy) ? 2 : 1;
  require(mesh.ndim() == wanted, "from_fsdp1: {} needs a {}-D mesh, found {}; use {}",
          name_of(strategy), wanted, mesh.to_string(),
          wanted == 2 ? "hybrid_mesh(world), or init_device_mesh(world, {replicas, shards}, "
                        "{\"replicate\", \"shard\"})"
                      : "a hybrid strategy, or one dimension of the mesh");
}

void check_device(const c10::Device& asked, const DeviceMesh& mesh) {
  const auto device = mesh.device();
  const bool is_same = asked.type() == device.type() &&
                       (!asked.has_index() || device.is_cpu() || asked.index() == device.index());
  require(
      is_same,
      "from_fsdp1: device_id is {}, but the mesh's device on this rank is {}; make the mesh with "
      "DeviceMeshOptions::device_type, and let LOCAL_RANK say the index",
      asked.str(), device.str());
}

bool has_meta(const torch::nn::Module& module) {
  auto is_meta = [](const auto& item) { return item.value().defined() && item.value().is_meta(); };
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto buffers = module.named_buffers(/*recurse=*/false);
  return std::any_of(parameters.begin(), parameters.end(), is_meta) ||
         std::any_of(buffers.begin(), buffers.end(), is_meta);
}

using Ignored = std::vector<std::shared_ptr<torch::nn::Module>>;

/// `visit` for the module and all below it, outer ones first, without those that are ignored and all below them.
void for_modules(torch::nn::Module& module, const std::string& path, const Ignored& ignored,
                 const std::function<void(torch::nn::Module&, const std::string&)>& visit) {
  if (std::any_of(ignored.begin(), ignored.end(), [&](const auto& each) { return each.get() == &module; })) return;
  visit(module, path);
  for (const auto& child : module.named_children())
    if (child.value())
      for_modules(*child.value(), join_path(path, child.key()), ignored, visit);
}

}  // namespace

Fsdp1Translation from_fsdp1(const Fsdp1Options& options) {
  const auto strategy = options.sharding_strategy;
  name_of(strategy);
  Fsdp1Translation translation;
  auto& own = translation.options;
  own.sync_from_rank0 = options.sync_module_states;
  if (options.mesh.defined())
    own.mesh = options.mesh;
  else
    own.mesh = is_hybrid(strategy) ? hybrid_mesh(default_process_group()) : default_device_mesh();
  check_mesh(own.mesh, strategy);
  if (options.device_id) check_device(*options.device_id, own.mesh);
  if (keeps_after_forward(strategy)) own.reshard_after_forward = false;
  if (options.cpu_offload) own.offload_policy = CPUOffloadPolicy{};
  own.replicate_only = strategy == ShardingStrategy::kNoShard;
  translation.prefetch_distance = options.limit_all_gathers ? 1 : 2;
  translation.unshard_in_backward = options.backward_prefetch == BackwardPrefetch::kPre;
  translation.param_init_fn = options.param_init_fn;
  return translation;
}

void Fsdp1Translation::before(torch::nn::Module& root) const {
  if (!param_init_fn) return;
  for_modules(root, "", options.ignored_modules, [&](torch::nn::Module& module, const std::string& path) {
    if (!has_meta(module)) return;
    param_init_fn(module);
    require(!has_meta(module),
            "from_fsdp1: param_init_fn has left parameters or buffers of {} ({}) on the meta device; it is called once for "
            "each module and must materialise that module's own ones",
            path.empty() ? "the root" : "'" + path + "'", module.name());
  });
}

void Fsdp1Translation::after(FSDPModule root) const {
  root.set_prefetch_distance(prefetch_distance);
  for (auto& module : root.sharded_modules()) module.set_unshard_in_backward(unshard_in_backward);
}

FSDPModule fully_shard_fsdp1(torch::nn::Module& root, const WrapPolicy& auto_wrap_policy,
                             const Fsdp1Options& options,
                             const std::function<void(FullyShardOptions&)>& more) {
  auto translation = from_fsdp1(options);
  if (more) more(translation.options);
  const auto plan = plan_wrapping(root, auto_wrap_policy, translation.options);
  translation.before(root);
  const auto sharded = apply_wrapping(plan);
  translation.after(sharded);
  return sharded;
}

}  // namespace fsdp
