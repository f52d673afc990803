#include "comm/debug/stream_stall.hpp"

#include <array>
#include <atomic>

#include "comm/nccl/nccl_backend.hpp"

namespace fsdp {

namespace {

std::atomic<StreamStall>& known(c10::DeviceType device) {
  static std::array<std::atomic<StreamStall>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> all{};
  return all.at(static_cast<size_t>(device));
}

}  // namespace

StreamStall stream_stall(c10::DeviceType device) {
  if (const StreamStall given = known(device)) return given;
  return device == c10::DeviceType::CUDA ? cuda_stream_stall() : nullptr;
}

void set_stream_stall(c10::DeviceType device, StreamStall stall) { known(device) = stall; }

}  // namespace fsdp
