#include "api/state_dict/first_rank.hpp"

#include <ATen/ATen.h>

#include <cstring>

#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "comm/watch/awaited_collectives.hpp"
#include "fsdp/fully_shard.hpp"
#include "module/state/module_state.hpp"
#include "tensor/broadcast_whole.hpp"

namespace fsdp {

DeviceMesh leading_mesh(const torch::nn::Module& module, const std::optional<FoundParam>& first) {
  const auto outermost = roots(module);
  if (!outermost.empty()) return outermost.front().mesh();
  return first ? first->group->identity().mesh_info.mesh : DeviceMesh();
}

LeadingMesh leading_mesh(const torch::nn::Module& module, const std::vector<NamedState>& states) {
  const auto sharded = std::find_if(states.begin(), states.end(),
                                    [](const NamedState& state) { return state.param.has_value(); });
  LeadingMesh leading;
  leading.all = leading.data = leading_mesh(module, sharded == states.end() ? std::nullopt : sharded->param);
  for (const auto& state : states)
    if (leading.is_of_all(state.param) && state.param && mesh_of(*state.param).ndim() > leading.all.ndim())
      leading.all = mesh_of(*state.param);
  return leading;
}

bool LeadingMesh::is_of_all(const std::optional<FoundParam>& param) const {
  if (!param) return true;
  const auto& mesh = param->group->identity().mesh_info.mesh;
  return mesh == data || mesh.size() >= all.size();
}

bool LeadingMesh::keeps(const std::optional<FoundParam>& param) const {
  return is_first_rank(is_of_all(param) ? all : mesh_of(*param));
}

void LeadingMesh::require_all(const std::vector<NamedState>& states, std::string_view caller) const {
  for (const auto& state : states)
    if (!is_of_all(state.param)) [[unlikely]]
      throw UsageError(fmt::format(
          "{}: broadcast_from_rank0 sends what the first rank of {} has, but that rank may have no values of '{}', which is "
          "on {} alone; load a dict on each rank",
          caller, all.to_string(), state.names.front(), mesh_of(*state.param).to_string()));
}

std::string broadcast_text(const std::string& text, const DeviceMesh& mesh,
                           const std::string& subject) {
  const auto on_cpu = at::TensorOptions().device(at::kCPU);
  auto length = at::full({1}, static_cast<int64_t>(text.size()), on_cpu.dtype(at::kLong));
  length = length.to(mesh.device());
  broadcast_from_first(length, mesh, subject);
  auto bytes = at::zeros({length.item<int64_t>()}, on_cpu.dtype(at::kByte));
  if (is_first_rank(mesh) && !text.empty())
    std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  bytes = bytes.to(mesh.device());
  broadcast_from_first(bytes, mesh, subject);
  bytes = bytes.cpu();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

void require_same_facts(const std::vector<ParamFact>& facts, const char* caller, const std::string& message) {
  std::vector<std::pair<Communicator*, std::string>> texts;
  for (const auto& [param, fact] : facts) {
    auto* group = param.group->identity().mesh_info.shard_group.get();
    auto text = std::find_if(texts.begin(), texts.end(),
                             [&](const auto& known) { return known.first == group; });
    if (text == texts.end()) text = texts.insert(texts.end(), {group, ""});
    text->second += fact + '\n';
  }
  bool same = true;
  for (const auto& [group, text] : texts) {
    if (group->size() == 1) continue;
    const auto hash = static_cast<int64_t>(stable_hash(text) >> 2);
    const auto largest = at::tensor({hash, -hash}, at::kLong).to(group->device_type());
    awaited::all_reduce(*group, largest, ReduceOp::kMax, caller);
    const auto found = largest.cpu();
    same &= found[0].item<int64_t>() == hash && found[1].item<int64_t>() == -hash;
  }
  require_state(same, "{}: {}", caller, message);
}

}  // namespace fsdp
