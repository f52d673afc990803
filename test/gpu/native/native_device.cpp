#include "native_device.hpp"

#ifdef FSDP_HAS_NCCL
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#endif

namespace fsdp::test {

#ifdef FSDP_HAS_NCCL
void spin(double ms) {
  constexpr double kCyclesPerMs = 1.5e6;  // at 1.5 GHz
  at::cuda::sleep(static_cast<int64_t>(ms * kCyclesPerMs));
}

std::function<void()> captured(const std::function<void()>& step) {
  constexpr int kWarmUp = 3;
  const auto before = c10::cuda::getCurrentCUDAStream();
  c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromPool());
  for (int turn = 0; turn < kWarmUp; ++turn) step();
  c10::cuda::device_synchronize();
  auto graph = std::make_shared<at::cuda::CUDAGraph>();
  graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  step();
  graph->capture_end();
  c10::cuda::setCurrentCUDAStream(before);
  c10::cuda::device_synchronize();
  return [graph] { graph->replay(); };
}
#else
void spin(double) {}
std::function<void()> captured(const std::function<void()>&) { return {}; }
#endif

}  // namespace fsdp::test
