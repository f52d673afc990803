#include <catch2/catch.hpp>

#include "fsdp/process_group.hpp"
#include "mesh/default_mesh.hpp"
#include "mesh/mesh_info.hpp"

namespace fsdp::test {

TEST_CASE("the default mesh stays the same one until its world is destroyed", "[mesh][default_mesh]") {
  destroy_process_group();
  const auto* group = default_device_mesh().get_group(0).get();
  CHECK(default_device_mesh().shape() == std::vector<int64_t>{1});
  CHECK(default_device_mesh().dim_names() == std::vector<std::string>{"shard"});
  CHECK(default_device_mesh().get_group(0).get() == group);

  const std::weak_ptr<Communicator> world = default_process_group();
  destroy_process_group();
  CHECK(world.expired());
}

}  // namespace fsdp::test
