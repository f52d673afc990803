#pragma once

#include <vector>

#include "mesh/mesh_info.hpp"
#include "param/param_spec.hpp"

// A parameter as a DTensor: on the data-parallel mesh of its group and, if it is tensor-parallel, that one's dimensions behind.
namespace fsdp {

/// Returns a placement for each dimension of `mesh_of`. Not for a parameter in a flat layout, which cuts no dimension.
std::vector<Placement> placements_of(const ParamSpec& spec, const MeshInfo& info);
const DeviceMesh& mesh_of(const ParamSpec& spec, const MeshInfo& info);
/// Return sizes and strides of the whole tensor: the unsharded parameter's, but for a tensor-parallel parameter.
const std::vector<int64_t>& whole_sizes(const ParamSpec& spec);
const std::vector<int64_t>& whole_strides(const ParamSpec& spec);

/// Returns how the data-parallel ranks hold it: of a tensor-parallel parameter, this rank's part. Never null.
DTensorSpec::Ptr data_parallel_spec(const ParamSpec& spec, const MeshInfo& info);
/// Returns how all ranks hold the whole. Null for one that is both tensor-parallel and in a flat layout.
DTensorSpec::Ptr dtensor_spec(const ParamSpec& spec, const MeshInfo& info);

}  // namespace fsdp
