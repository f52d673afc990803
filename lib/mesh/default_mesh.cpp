#include "mesh/default_mesh.hpp"

#include "comm/default_world.hpp"
#include "mesh/mesh_state.hpp"

namespace fsdp {

DeviceMesh default_device_mesh() {
  const auto mesh = with_default_world([](const std::shared_ptr<Communicator>& world) {
    return std::make_shared<const DeviceMesh>(init_device_mesh(world, {world->size()}, {"shard"}));
  });
  return *std::static_pointer_cast<const DeviceMesh>(mesh);
}

}  // namespace fsdp
