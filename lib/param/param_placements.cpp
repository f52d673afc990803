#include "param/param_placements.hpp"

namespace fsdp {

namespace {

std::vector<Placement> cut_by_data_parallelism(const ParamSpec& spec, const MeshInfo& info) {
  auto placements = info.placements();
  for (auto& placement : placements)
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim = spec.layout.dim();
  return placements;
}

}  // namespace

std::vector<Placement> placements_of(const ParamSpec& spec, const MeshInfo& info) {
  auto placements = cut_by_data_parallelism(spec, info);
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

DTensorSpec::Ptr data_parallel_spec(const ParamSpec& spec, const MeshInfo& info) {
  if (spec.layout.is_flat()) return std::make_shared<const DTensorSpec>(info.mesh, spec.layout, info.shard_group, spec.name);
  return std::make_shared<const DTensorSpec>(info.mesh, cut_by_data_parallelism(spec, info), spec.sizes(), spec.strides(),
                                             spec.name);
}

DTensorSpec::Ptr dtensor_spec(const ParamSpec& spec, const MeshInfo& info) {
  const auto& part = spec.reach.part;
  // What tensor parallelism has cut is no tensor that is flat in memory.
  if (spec.layout.is_flat()) return part && !part->is_whole() ? nullptr : data_parallel_spec(spec, info);
  if (!part) return data_parallel_spec(spec, info);
  return std::make_shared<const DTensorSpec>(part->whole_mesh, placements_of(spec, info), part->sizes, part->strides,
                                             spec.name);
}

}  // namespace fsdp
