#include "fsdp/device_mesh.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/require.hpp"
#include "mesh/mesh_state.hpp"

namespace fsdp {
namespace {

using State = DeviceMesh::Access::State;

// The accessors are called for every parameter, so the good case must not format a message's parts.

const State& member_state(const DeviceMesh& mesh) {
  const State& state = DeviceMesh::Access::state(mesh);
  if (state.coordinates.empty()) [[unlikely]]
    throw StateError(fmt::format("{}: this rank is not one of its ranks {}; ask is_member() first",
                                 mesh.to_string(), fmt::join(state.ranks, ", ")));
  return state;
}

int checked_dim(const DeviceMesh& mesh, int dim) {
  if (dim < 0 || dim >= mesh.ndim()) [[unlikely]]
    throw UsageError(fmt::format("{}: expected a dimension in [0, {}), got {}", mesh.to_string(),
                                 mesh.ndim(), dim));
  return dim;
}

/// Returns the list that has this rank; the first if this rank is not a member.
std::vector<int> own_list(const State& state, std::vector<std::vector<int>> lists) {
  if (state.coordinates.empty()) return std::move(lists.front());
  const std::vector<int64_t> steps = row_major_steps(state.shape);
  const int own_rank = state.ranks[std::inner_product(steps.begin(), steps.end(),
                                                      state.coordinates.begin(), int64_t{0})];
  return std::move(*std::find_if(lists.begin(), lists.end(), [own_rank](const auto& list) {
    return std::find(list.begin(), list.end(), own_rank) != list.end();
  }));
}

}  // namespace

c10::DeviceType DeviceMesh::device_type() const { return device().type(); }

c10::Device DeviceMesh::device() const { return DeviceMesh::Access::state(*this).device; }

int DeviceMesh::ndim() const { return static_cast<int>(shape().size()); }

const std::vector<int64_t>& DeviceMesh::shape() const { return DeviceMesh::Access::state(*this).shape; }

const std::vector<std::string>& DeviceMesh::dim_names() const {
  return DeviceMesh::Access::state(*this).dim_names;
}

int64_t DeviceMesh::size(std::optional<int> dim) const {
  return dim ? shape()[checked_dim(*this, *dim)] : static_cast<int64_t>(ranks().size());
}

const std::vector<int>& DeviceMesh::ranks() const { return DeviceMesh::Access::state(*this).ranks; }

const std::vector<int64_t>& DeviceMesh::get_coordinate() const { return member_state(*this).coordinates; }

bool DeviceMesh::is_member() const { return !DeviceMesh::Access::state(*this).coordinates.empty(); }

int64_t DeviceMesh::get_local_rank(int dim) const { return get_coordinate()[checked_dim(*this, dim)]; }

int64_t DeviceMesh::get_local_rank(std::string_view dim_name) const { return get_local_rank(dim(dim_name)); }

std::shared_ptr<Communicator> DeviceMesh::get_group(int dim) const {
  return member_state(*this).groups[checked_dim(*this, dim)];
}

std::shared_ptr<Communicator> DeviceMesh::get_group(std::string_view dim_name) const {
  return get_group(dim(dim_name));
}

int DeviceMesh::dim(std::string_view dim_name) const {
  const std::vector<std::string>& names = dim_names();
  const auto found = std::find(names.begin(), names.end(), dim_name);
  if (found == names.end()) [[unlikely]]
    throw UsageError(fmt::format(
        "{}: expected one of its dimension names ({}), got \"{}\"", to_string(),
        names.empty() ? "it has none" : fmt::format("{}", fmt::join(names, ", ")), dim_name));
  return static_cast<int>(found - names.begin());
}

DeviceMesh DeviceMesh::operator[](std::string_view dim_name) const {
  return submesh({std::string(dim_name)});
}

DeviceMesh DeviceMesh::submesh(const std::vector<std::string>& dim_names) const {
  const State& state = DeviceMesh::Access::state(*this);
  require(!dim_names.empty(), "{}: a sub-mesh needs at least one of its dimension names, got none",
          to_string());
  std::vector<int> dims;
  State sub;
  for (const std::string& name : dim_names) {
    const int d = dim(name);
    require(std::find(dims.begin(), dims.end(), d) == dims.end(),
            "{}: a sub-mesh takes each dimension once, got \"{}\" twice", to_string(), name);
    dims.push_back(d);
    sub.shape.push_back(state.shape[d]);
    sub.groups.push_back(state.groups[d]);
    sub.root_dims.push_back(state.root_dims[d]);
    if (is_member()) sub.coordinates.push_back(state.coordinates[d]);
  }
  sub.device = state.device;
  sub.dim_names = dim_names;
  sub.ranks = own_list(state, rank_lists(state.shape, state.ranks, dims));
  sub.root = state.root;
  return DeviceMesh::Access::make(std::move(sub));
}

DeviceMesh DeviceMesh::flatten(const std::string& dim_name) const {
  const State& state = DeviceMesh::Access::state(*this);
  require(!dim_name.empty(), "{}: flatten needs a name for the new dimension, got an empty one",
          to_string());
  State flat = state;
  flat.dim_names = {dim_name};
  if (ndim() == 1) return DeviceMesh::Access::make(std::move(flat));

  const RootMesh& root = *state.root;
  require(root.world != nullptr,
          "{}: flatten makes a group out of the world, but this mesh was made from groups and knows no "
          "world; make it with init_device_mesh",
          to_string());
  const std::vector<int64_t> steps = row_major_steps(state.shape);
  flat.shape = {size()};
  if (is_member())
    flat.coordinates = {std::inner_product(steps.begin(), steps.end(), state.coordinates.begin(),
                                           int64_t{0})};
  // The ranks elsewhere in the root mesh flatten their own slices at the same time.
  flat.groups = {make_groups(*root.world, dim_name,
                             rank_lists(root.shape, root.ranks, state.root_dims))};
  flat.root = std::make_shared<RootMesh>(RootMesh{.world = root.world,
                                                  .shape = flat.shape,
                                                  .ranks = flat.ranks,
                                                  .post_forward_groups = {},
                                                   .left_out = {}});
  flat.root_dims = {0};
  return DeviceMesh::Access::make(std::move(flat));
}

std::string DeviceMesh::to_string() const {
  if (!defined()) return "DeviceMesh(undefined)";
  std::string text = "DeviceMesh(" + c10::DeviceTypeName(device_type(), /*lower_case=*/true);
  for (size_t d = 0; d < shape().size(); ++d)
    text += dim_names().empty() ? fmt::format(", {}", shape()[d])
                                : fmt::format(", {}={}", dim_names()[d], shape()[d]);
  return text + ")";
}

bool operator==(const DeviceMesh& one, const DeviceMesh& other) {
  if (!one.defined() || !other.defined()) return one.defined() == other.defined();
  return &DeviceMesh::Access::state(one) == &DeviceMesh::Access::state(other) ||
         (one.shape() == other.shape() && one.ranks() == other.ranks() && one.dim_names() == other.dim_names() &&
          one.device_type() == other.device_type());
}

}  // namespace fsdp
