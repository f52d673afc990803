#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/api.hpp"

namespace fsdp {

/// One name of a mesh dimension, or several: "dp", or {"dp", "cp"}.
struct FSDP_API MeshDimNames {
  MeshDimNames() = default;
  MeshDimNames(const char* name) : names{std::string(name)} {}
  MeshDimNames(std::string name) : names{std::move(name)} {}
  MeshDimNames(std::initializer_list<std::string> several) : names(several) {}
  MeshDimNames(std::vector<std::string> several) : names(std::move(several)) {}

  std::vector<std::string> names;
};

/// The data-parallel dimensions of a mesh, as in FSDP2. At least one of the two has names. Several names are flattened into one
/// dimension, in the order given. Along dimensions that neither names, such as tensor parallelism, parameters are taken to be
/// equal, unless FullyShardOptions::tensor_parallel_fn says which part of a tensor they are.
struct FSDP_API DataParallelMeshDims {
  MeshDimNames shard = {};      ///< none: replicate only
  MeshDimNames replicate = {};  ///< none: no replicas
};

}  // namespace fsdp
