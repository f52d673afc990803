#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

/// One name of a mesh dimension, or several: "dp", or {"dp", "cp"}.
struct MeshDimNames {
  MeshDimNames() = default;
  MeshDimNames(const char* name) : names{std::string(name)} {}
  MeshDimNames(std::string name) : names{std::move(name)} {}
  MeshDimNames(std::initializer_list<std::string> several) : names(several) {}
  MeshDimNames(std::vector<std::string> several) : names(std::move(several)) {}

  std::vector<std::string> names;
};

/// Which dimensions of a full mesh are data parallel, as FSDP2 says it. Several names for one part are
/// flattened into one dimension, in the order given. At least one of the two has names; what neither names
/// (tensor parallelism, say) is left to others: parameters are the same there unless
/// FullyShardOptions::tensor_parallel_fn says which part of a tensor they are.
struct DataParallelMeshDims {
  MeshDimNames shard = {};      ///< none: replicate only
  MeshDimNames replicate = {};  ///< none: no replicas
};

}  // namespace fsdp
