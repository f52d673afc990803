#pragma once

#include <c10/core/Stream.h>

#include <chrono>

namespace fsdp {

/// What is queued on `stream` from now on begins so much later. The host does not wait.
using StreamStall = void (*)(c10::Stream stream, std::chrono::microseconds duration);

/// How a device's streams are stalled; null: nobody knows. CUDA's is known in builds with CUDA.
StreamStall stream_stall(c10::DeviceType device);

/// For devices that LibTorch gets from elsewhere.
void set_stream_stall(c10::DeviceType device, StreamStall stall);

}  // namespace fsdp
