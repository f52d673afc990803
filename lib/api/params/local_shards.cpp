#include "fsdp/local_shards.hpp"

#include "api/params/find_param.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "root/edit/make_local_shards.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

std::vector<std::string> labels_of(const ParamGroup& group, const ShardLabel& label) {
  std::vector<std::string> labels;
  for (const auto& param : group.params())
    labels.push_back(label && !param.has_moved_away ? label(param.name(), param.sharded_param()) : std::string());
  return labels;
}

LocalShard local_shard(const ModuleState& state, const ParamGroup& group, const LocalShards::Class& one) {
  LocalShard local{.shard = one.shard, .label = one.label, .module = state.tree().name(), .parts = {}};
  const int rank = group.identity().mesh_info.shard_rank();
  const auto itemsize = static_cast<int64_t>(c10::elementSize(one.dtype));
  for (const size_t i : one.members) {
    const auto& param = group.params()[i];
    const int64_t numel = param.layout().local_numel(rank);
    const int64_t offset = numel > 0 ? group.parts().layout.stored_offset(i) / itemsize - one.begin : 0;
    local.parts.push_back({param.name(), param.sharded_param(), offset, numel});
  }
  return local;
}

}  // namespace

std::optional<FoundParam> find_local_shard(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;
  const auto* storage = ParamStorage::of(tensor.unsafeGetTensorImpl());
  if (storage == nullptr || storage->owner() == nullptr) return std::nullopt;
  auto& port = static_cast<GroupPort&>(*storage->owner());
  const auto& parts = port.group().parts();
  const size_t params = parts.params.size();
  if (storage->index() < params || !parts.local_shards) return std::nullopt;
  const auto& one = parts.local_shards->all()[storage->index() - params];
  if (!one.shard.is_same(tensor)) return std::nullopt;
  return FoundParam{port.share_group(), one.members.front(), /*is_unsharded_param=*/false};
}

std::vector<LocalShard> local_shards(const torch::nn::Module& module, const ShardLabel& label) {
  std::vector<LocalShard> shards;
  for (const auto& root : roots(module))
    handles::state(root).visit([&](ModuleState& state) {
      for (const auto& group : state.live_groups())
        for (const auto& one : make_local_shards(*group, labels_of(*group, label)).all())
          shards.push_back(local_shard(state, *group, one));
    });
  return shards;
}

}  // namespace fsdp
