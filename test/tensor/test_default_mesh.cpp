#include <catch2/catch.hpp>

#include "fsdp/process_group.hpp"
#include "mesh/default_mesh.hpp"
#include "mesh/mesh_state.hpp"

namespace fsdp::test {

TEST_CASE("the default mesh stays the same one while it is used, and goes with its world", "[mesh][default_mesh]") {
  destroy_process_group();
  auto mesh = default_device_mesh();
  CHECK(mesh.shape() == std::vector<int64_t>{1});
  CHECK(mesh.dim_names() == std::vector<std::string>{"shard"});
  CHECK(DeviceMeshAccess::shared_state(default_device_mesh()) == DeviceMeshAccess::shared_state(mesh));

  std::weak_ptr<Communicator> world = default_process_group();
  destroy_process_group();
  const auto other = default_device_mesh();
  CHECK(DeviceMeshAccess::shared_state(other) != DeviceMeshAccess::shared_state(mesh));
  mesh = DeviceMesh();
  CHECK(world.expired());
  destroy_process_group();
}

}  // namespace fsdp::test
