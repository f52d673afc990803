#pragma once

#include <c10/core/Device.h>

namespace fsdp::bench {

/// Where tensors of this rank are: the CPU, or the current device, which joining a world over a device chooses.
/// Throws UsageError if there is no such device.
c10::Device current_device(c10::DeviceType type);

/// Returns when all that is queued on the device has run. The CPU: at once.
void synchronize(c10::Device device);

/// Keeps a CUDA device busy for a chosen time.
class DeviceSpin {
 public:
  /// Measures how fast the device counts, which takes some milliseconds. Throws UsageError in a build without CUDA.
  explicit DeviceSpin(c10::Device device);
  /// Queues one kernel on the current stream, which takes `us` microseconds and no memory bandwidth.
  void operator()(double us) const;

 private:
  double cycles_per_us_ = 0;
};

}  // namespace fsdp::bench
