#include "mesh/mesh_state.hpp"

#include <algorithm>
#include <numeric>

#include "base/require.hpp"
#include "comm/single_rank.hpp"

namespace fsdp {

const DeviceMesh::State& DeviceMesh::Access::state(const DeviceMesh& mesh) {
  require(mesh.defined(), "device mesh: expected a mesh, got an undefined one; make it with "
                          "init_device_mesh, DeviceMesh::from_group or hybrid_mesh");
  return *mesh.state_;
}

DeviceMesh DeviceMesh::Access::make(State state) {
  DeviceMesh mesh;
  mesh.state_ = std::make_shared<const State>(std::move(state));
  return mesh;
}

std::vector<int64_t> row_major_steps(const std::vector<int64_t>& shape) {
  std::vector<int64_t> steps(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) steps[dim - 1] = steps[dim] * shape[dim];
  return steps;
}

namespace {

/// Every position reached by walking `dims` from the first, the last of them fastest.
std::vector<int64_t> walk(const std::vector<int64_t>& shape, const std::vector<int>& dims) {
  const std::vector<int64_t> steps = row_major_steps(shape);
  std::vector<int64_t> positions = {0};
  for (const int dim : dims) {
    std::vector<int64_t> next;
    next.reserve(positions.size() * shape[dim]);
    for (const int64_t position : positions)
      for (int64_t i = 0; i < shape[dim]; ++i) next.push_back(position + i * steps[dim]);
    positions = std::move(next);
  }
  return positions;
}

}  // namespace

std::vector<std::vector<int>> rank_lists(const std::vector<int64_t>& shape,
                                         const std::vector<int>& mesh_ranks,
                                         const std::vector<int>& dims) {
  std::vector<int> others;
  for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim)
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) others.push_back(dim);
  const std::vector<int64_t> offsets = walk(shape, dims);
  std::vector<std::vector<int>> lists;
  for (const int64_t start : walk(shape, others)) {
    std::vector<int>& list = lists.emplace_back();
    for (const int64_t offset : offsets) list.push_back(mesh_ranks[start + offset]);
  }
  return lists;
}

std::shared_ptr<Communicator> make_groups(Communicator& world, const std::string& dim_name,
                                          const std::vector<std::vector<int>>& lists) {
  // Note [One fixed order]
  // Creating a group is a collective over the world, so every rank creates every group, its own or
  // not, in the order of the lists, which depends on the mesh's shape and ranks alone.
  std::vector<int> whole_world(world.size());
  std::iota(whole_world.begin(), whole_world.end(), 0);
  std::shared_ptr<Communicator> mine;
  for (const std::vector<int>& list : lists) {
    std::shared_ptr<Communicator> group;
    if (list == whole_world)
      group = world.shared_from_this();
    else if (list.size() > 1)
      group = world.split(list, dim_name.empty() ? "mesh" : dim_name);
    else if (list.front() == world.rank())
      group = single_rank_on(world.device_type());
    if (group) mine = std::move(group);
  }
  return mine;
}

}  // namespace fsdp
