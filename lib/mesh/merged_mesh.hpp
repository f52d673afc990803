#pragma once

#include <vector>

#include "fsdp/device_mesh.hpp"

namespace fsdp {

/// The mesh whose dimension i is the dimensions dims[i] of `mesh` made one, in their order; no dimension twice.
/// Where any of these has several it makes groups, as flatten does, a collective call, but only the first
/// time for a mesh and those cut from it. Throws UsageError if such a mesh was made from groups.
DeviceMesh merged_mesh(const DeviceMesh& mesh, const std::vector<std::vector<int>>& dims);

/// The mesh of the dimensions of `first` followed by those of `second`. No communication. Throws UsageError
/// unless both were cut from one mesh and have no dimension in common.
DeviceMesh joined_mesh(const DeviceMesh& first, const DeviceMesh& second);

}  // namespace fsdp
