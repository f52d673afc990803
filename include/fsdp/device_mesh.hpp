#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// An n-dimensional arrangement of ranks, with one group of ranks per dimension (the ranks that
/// differ from this one in that coordinate alone). A cheap value: copies share the groups.
/// A default-constructed mesh is undefined and stands for "not given"; asking it anything but
/// `defined` and `to_string` throws UsageError. What asks for this rank's place or group throws
/// StateError on a rank that is not a member, and UsageError for a dimension that does not exist.
///
/// Not thread-safe: a mesh belongs to one rank, and ranks that are threads make one each.
class DeviceMesh {
 public:
  DeviceMesh() = default;

  bool defined() const { return state_ != nullptr; }
  explicit operator bool() const { return defined(); }

  c10::DeviceType device_type() const;
  /// The device of this rank: CPU, or the accelerator with the index LOCAL_RANK, settled when the
  /// mesh is made. Where no launcher gave an index that exists: the current one, with a warning.
  c10::Device device() const;
  int ndim() const;
  const std::vector<int64_t>& shape() const;
  /// Empty if the mesh was made without names (allowed for one dimension only).
  const std::vector<std::string>& dim_names() const;
  /// Of one dimension; none: the number of all its ranks.
  int64_t size(std::optional<int> dim = {}) const;
  /// All ranks of the mesh, row-major, as ranks of the world it was made from.
  const std::vector<int>& ranks() const;
  /// This rank's position in each dimension.
  const std::vector<int64_t>& coordinates() const;
  bool is_member() const;

  /// This rank's place in, and the group of, one dimension. A 1-D mesh may leave the name out.
  int64_t local_rank(int dim = 0) const;
  std::shared_ptr<Communicator> group(int dim = 0) const;
  std::shared_ptr<Communicator> group(std::string_view dim_name) const;
  /// Throws UsageError naming the known dimensions if there is no such name.
  int dim(std::string_view dim_name) const;

  /// The sub-mesh of the named dimensions through this rank, in the order given, sharing this mesh's
  /// groups. No communication. Throws UsageError for an unknown or repeated name, or none at all.
  DeviceMesh operator[](std::string_view dim_name) const;
  DeviceMesh submesh(const std::vector<std::string>& dim_names) const;
  /// The 1-D mesh over all ranks of this mesh, row-major. Unless the mesh is 1-D already it makes new
  /// groups, one for each sub-mesh like this one: a collective call over the world that the mesh was
  /// made from. Throws UsageError for an empty name, or if the mesh was made from groups.
  DeviceMesh flatten(const std::string& dim_name) const;

  /// "DeviceMesh(cpu, replicate=2, shard=4)", without names "DeviceMesh(cpu, 4)".
  std::string to_string() const;

  /// The library's own way in.
  struct Access;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// True if both arrange the same ranks in the same shape, with the same names, on one device type.
bool operator==(const DeviceMesh& one, const DeviceMesh& other);

struct DeviceMeshOptions {
  /// Empty: the world's device type.
  std::optional<c10::DeviceType> device_type = {};
  /// The members as ranks of the world, row-major; empty: all ranks of the world.
  std::vector<int> ranks = {};
};

/// Makes a mesh over `world`. A collective call: all ranks of `world` make it, members or not, and all
/// groups are created in one fixed order. A dimension that spans the world in its order reuses the
/// world's group; one of size 1 communicates nothing.
/// Throws UsageError, before any group is made, if shape and rank count differ, a rank is repeated or
/// unknown, names are repeated, empty or not one per dimension, or there is no such device.
DeviceMesh init_device_mesh(std::shared_ptr<Communicator> world, const std::vector<int64_t>& shape,
                            const std::vector<std::string>& dim_names = {},
                            const DeviceMeshOptions& options = {});

/// Makes a mesh from groups that exist: one group (FSDP), or {shard, replicate} (HSDP), which gives
/// a mesh of shape (replicate, shard), by default with these names. Ranks and coordinates come from
/// the groups; ranks outside this rank's own groups are taken to continue their pattern. No
/// communication. Throws UsageError for another number of groups, a null one, two that do not cross
/// in this rank alone, or wrong names.
DeviceMesh mesh_from_groups(const std::vector<std::shared_ptr<Communicator>>& groups,
                            const std::vector<std::string>& dim_names = {});

/// A ("replicate", "shard") mesh that shards within a node and replicates across nodes, from the
/// launcher's local world size, which the ranks compare in one all-gather: a collective call.
/// Throws UsageError, on every rank, if the nodes are unequal or their ranks not consecutive.
DeviceMesh hybrid_mesh(std::shared_ptr<Communicator> world);

}  // namespace fsdp
