#include "param/param_placements.hpp"

namespace fsdp {

std::vector<Placement> placements_of(const ParamSpec& spec, const MeshInfo& info) {
  auto placements = info.placements();
  for (auto& placement : placements)
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim = spec.layout.dim();
  const auto& part = spec.reach.part;
  return part ? part->with(std::move(placements)) : placements;
}

const DeviceMesh& mesh_of(const ParamSpec& spec, const MeshInfo& info) {
  return spec.reach.part ? spec.reach.part->whole_mesh : info.mesh;
}

const std::vector<int64_t>& whole_sizes(const ParamSpec& spec) {
  return spec.reach.part ? spec.reach.part->sizes : spec.sizes();
}

const std::vector<int64_t>& whole_strides(const ParamSpec& spec) {
  return spec.reach.part ? spec.reach.part->strides : spec.strides();
}

DTensorSpec::Ptr dtensor_spec(const ParamSpec& spec, const MeshInfo& info) {
  if (spec.layout.is_flat()) {
    // What tensor parallelism has cut is no tensor that is flat in memory.
    if (spec.reach.part && !spec.reach.part->is_whole()) return nullptr;
    return std::make_shared<const DTensorSpec>(info.mesh, spec.layout, info.shard_group, spec.name);
  }
  return std::make_shared<const DTensorSpec>(mesh_of(spec, info), placements_of(spec, info), whole_sizes(spec),
                                             whole_strides(spec), spec.name);
}

}  // namespace fsdp
