#pragma once

#include <c10/core/Device.h>

#include "fsdp/launch_environment.hpp"

namespace fsdp {

/// What is known about the accelerators that this process sees.
struct VisibleDevices {
  int count = 0;
  int current = 0;
};

/// The index that this rank uses: LOCAL_RANK if a launcher gave one and there is such a
/// device, else the current device, which is warned about once.
int device_index(c10::DeviceType type, const LaunchEnvironment& launch, const VisibleDevices& visible);

/// CPU, or the accelerator with its index. Throws UsageError if this process sees no such device.
c10::Device device_of_rank(c10::DeviceType type);

}  // namespace fsdp
