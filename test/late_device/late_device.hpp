#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "comm/host_streams.hpp"

namespace fsdp::test {

// Note [Late device]
// A device of LibTorch's (PrivateUse1, "late") whose memory is the host's and whose streams are threads of the host.
// Operators return at once; their CPU kernels run later, in the order of the stream that was current, on the memory
// where it was then. As on a GPU nothing keeps that memory but its owner: what is given back is poisoned (NaN) behind
// what its own stream has queued, and reused by that stream at once. So a wait that is missing between streams, or
// memory that is given back too early, shows as a wrong result.
//
// Devices are there in a fixed number. What is seeded are the delays; the host's scheduler adds its own.

inline constexpr auto kLate = c10::DeviceType::PrivateUse1;
inline constexpr int kLateDevices = 4;  ///< a rank each: autograd has one thread for a device

c10::Device late(int index);
bool is_late(c10::Device device);

/// The streams of all late devices, and the memory of what is freed there, while it lives. One at a time; nothing
/// on a late device is made or run without it.
class LateDevices {
 public:
  explicit LateDevices(HostStreams::Options options);
  /// Returns when all that is queued has run.
  ~LateDevices();
  LateDevices(const LateDevices&) = delete;
  LateDevices& operator=(const LateDevices&) = delete;

  /// For a communicator, too: its streams are the device's, the current one is the caller's on that device.
  static std::shared_ptr<HostStreams> streams(int index);
};

/// While it lives nothing can be set to this device: who tries gets an error.
class LostDevice {
 public:
  explicit LostDevice(int index);
  ~LostDevice();
  LostDevice(const LostDevice&) = delete;
  LostDevice& operator=(const LostDevice&) = delete;

 private:
  const int index_;
};
bool is_lost(int index);

/// How often somebody has told the allocator that a stream uses memory that is another's. Since the program began.
int streams_recorded(int index);

/// How often the host has waited for a device, or has asked it: copies that block, reads of one number, streams,
/// events and devices that are synchronized. Since the program began.
int host_waits(int index);

}  // namespace fsdp::test
