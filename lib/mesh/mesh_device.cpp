#include "mesh/mesh_device.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/log.hpp"
#include "base/require.hpp"

namespace fsdp {

int device_index(c10::DeviceType type, const LaunchEnvironment& launch,
                 const VisibleDevices& visible) {
  const bool is_launched = launch.launcher != "none";
  if (is_launched && launch.local_rank < visible.count) return launch.local_rank;
  // A launcher that shows each process its own device only is as common as one that sets LOCAL_RANK.
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  warn_once(is_launched
                ? fmt::format("device mesh: local rank {} but {} visible {} device(s); taking the "
                              "current one, {}:{}",
                              launch.local_rank, visible.count, name, name, visible.current)
                : fmt::format("device mesh: {} without an index, as no launcher set LOCAL_RANK; "
                              "taking the current one, {}:{}",
                              name, name, visible.current));
  return visible.current;
}

c10::Device device_of_rank(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return c10::kCPU;
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  require(c10::impl::hasDeviceGuardImpl(type),
          "device mesh: device type {} needs a LibTorch built for it, found none; use cpu", name);
  const c10::impl::VirtualGuardImpl devices(type);
  const int count = devices.deviceCount();
  require(count > 0, "device mesh: device type {} needs a device, found 0 visible; use cpu", name);
  const int index =
      device_index(type, launch_environment(), {.count = count, .current = devices.getDevice().index()});
  return c10::Device(type, static_cast<c10::DeviceIndex>(index));
}

}  // namespace fsdp
