#pragma once

#include <c10/core/Stream.h>

#include <chrono>

namespace fsdp {

/// Delays what is queued on `stream` from now on by `duration`. The host does not wait.
using StreamStall = void (*)(c10::Stream stream, std::chrono::microseconds duration);

/// Returns how a device's streams are stalled; null: nobody knows. CUDA's is known in builds with CUDA.
StreamStall stream_stall(c10::DeviceType device);

/// Sets how streams are stalled, for devices that LibTorch gets from elsewhere.
void set_stream_stall(c10::DeviceType device, StreamStall stall);

}  // namespace fsdp
