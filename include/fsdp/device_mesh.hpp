#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// An n-dimensional arrangement of ranks. In each dimension, the ranks that differ from this one in that coordinate only form
/// a group. Copies share the groups.
///
/// A default-constructed mesh is undefined and means "not given"; all but `defined` and `to_string` throw UsageError on it.
/// Functions for this rank's position or group throw StateError if this rank is not a member, and UsageError for an unknown
/// dimension.
///
/// Not thread-safe: if ranks are threads, each makes its own.
class FSDP_API DeviceMesh {
 public:
  DeviceMesh() = default;
  /// Makes a mesh from existing groups: one group (FSDP), or {shard, replicate} (HSDP), which gives a mesh of shape (replicate,
  /// shard) with these names by default. Ranks outside this rank's groups are assumed to follow the same pattern. No
  /// communication. Throws UsageError for another number of groups, a null group, two groups that have other ranks than this
  /// one in common, and wrong names.
  static DeviceMesh from_group(const std::vector<std::shared_ptr<Communicator>>& groups,
                               const std::vector<std::string>& dim_names = {});

  bool defined() const { return state_ != nullptr; }
  explicit operator bool() const { return defined(); }

  c10::DeviceType device_type() const;
  /// This rank's device: the CPU, or the accelerator with index LOCAL_RANK. It is set when the mesh is made. Without a valid
  /// LOCAL_RANK: the current device, with a warning.
  c10::Device device() const;
  int ndim() const;
  const std::vector<int64_t>& shape() const;
  /// Empty if the mesh has no names, which only a 1-D mesh may have.
  const std::vector<std::string>& dim_names() const;
  /// The size of a dimension; without one, the number of ranks.
  int64_t size(std::optional<int> dim = {}) const;
  /// All ranks of the mesh in row-major order, as ranks of the world.
  const std::vector<int>& ranks() const;
  /// This rank's position in each dimension.
  const std::vector<int64_t>& get_coordinate() const;
  bool is_member() const;

  /// This rank's position in a dimension, and that dimension's group.
  int64_t get_local_rank(int dim = 0) const;
  int64_t get_local_rank(std::string_view dim_name) const;
  std::shared_ptr<Communicator> get_group(int dim = 0) const;
  std::shared_ptr<Communicator> get_group(std::string_view dim_name) const;
  /// The index of a named dimension. Throws UsageError with the names that exist if there is no such name.
  int dim(std::string_view dim_name) const;

  /// The sub-mesh of the named dimensions that contains this rank, in the order given. It shares this mesh's groups. No
  /// communication. Throws UsageError for an unknown or repeated name, and without names.
  DeviceMesh operator[](std::string_view dim_name) const;
  DeviceMesh submesh(const std::vector<std::string>& dim_names) const;
  /// The 1-D mesh over all ranks of this mesh, in row-major order. Unless this mesh is 1-D, a collective call over the world,
  /// as each sub-mesh like this one gets a new group. Throws UsageError for an empty name, or if the mesh was made from
  /// groups.
  DeviceMesh flatten(const std::string& dim_name) const;

  /// "DeviceMesh(cpu, replicate=2, shard=4)", without names "DeviceMesh(cpu, 4)".
  std::string to_string() const;

  // 0.1's names.
  [[deprecated("use get_coordinate")]] const std::vector<int64_t>& coordinates() const { return get_coordinate(); }
  [[deprecated("use get_local_rank")]] int64_t local_rank(int dim = 0) const { return get_local_rank(dim); }
  [[deprecated("use get_group")]] std::shared_ptr<Communicator> group(int dim = 0) const { return get_group(dim); }
  [[deprecated("use get_group")]] std::shared_ptr<Communicator> group(std::string_view dim_name) const {
    return get_group(dim_name);
  }

  /// The library's own way in.
  struct Access;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// True if both have the same ranks, shape, names and device type.
FSDP_API bool operator==(const DeviceMesh& one, const DeviceMesh& other);

struct FSDP_API DeviceMeshOptions {
  /// Default: the world's device type.
  std::optional<c10::DeviceType> device_type = {};
  /// The members in row-major order, as ranks of the world. Empty: all ranks.
  std::vector<int> ranks = {};
};

/// Makes a mesh over `world`. A collective call of all ranks of `world`, members or not. A dimension that has all ranks of the
/// world in order uses the world's group; one of size 1 communicates nothing.
///
/// Throws UsageError, before any group is made, if the shape does not fit the number of ranks, a rank is repeated or unknown,
/// names are repeated, empty or not one per dimension, or there is no such device.
FSDP_API DeviceMesh init_device_mesh(std::shared_ptr<Communicator> world, const std::vector<int64_t>& shape,
                                     const std::vector<std::string>& dim_names = {},
                                     const DeviceMeshOptions& options = {});

/// 0.1's name.
[[deprecated("use DeviceMesh::from_group")]] inline DeviceMesh mesh_from_groups(
    const std::vector<std::shared_ptr<Communicator>>& groups, const std::vector<std::string>& dim_names = {}) {
  return DeviceMesh::from_group(groups, dim_names);
}

/// Makes a ("replicate", "shard") mesh that shards within a node and replicates across nodes. A collective call: one all-gather
/// compares the launcher's local world sizes. Throws UsageError on every rank if nodes have different numbers of ranks, or
/// ranks that are not consecutive.
FSDP_API DeviceMesh hybrid_mesh(std::shared_ptr<Communicator> world);

}  // namespace fsdp
