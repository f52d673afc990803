// Compiled in builds with CUDA only.
#include <ATen/cuda/Sleep.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <vector>

#include "base/side_stream.hpp"
#include "comm/nccl/comm_streams.hpp"
#include "comm/nccl/nccl_backend.hpp"

namespace fsdp {
namespace {

/// Events that nobody holds any more: to make one costs as much as to launch a kernel.
class EventPool {
 public:
  std::unique_ptr<c10::Event> take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<c10::Event>(c10::DeviceType::CUDA);
    auto event = std::move(free_.back());
    free_.pop_back();
    return event;
  }
  void give_back(std::unique_ptr<c10::Event> event) {
    std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> free_;
};

class CudaEvent final : public StreamEvent {
 public:
  CudaEvent(std::shared_ptr<EventPool> pool, c10::Stream stream) : pool_(std::move(pool)), event_(pool_->take()) {
    event_->record(stream);
  }
  ~CudaEvent() override { pool_->give_back(std::move(event_)); }

  bool is_done() const override {
    // While any thread captures a graph, a query from this one would spoil the capture.
    const c10::cuda::CUDAStreamCaptureModeGuard beside_captures(cudaStreamCaptureModeRelaxed);
    return event_->query();
  }
  void block(c10::Stream stream) const { event_->block(stream); }

 private:
  std::shared_ptr<EventPool> pool_;
  std::unique_ptr<c10::Event> event_;
};

bool is_cuda_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status == cudaStreamCaptureStatusActive;
}

const bool answers = [] {
  set_capture_query(c10::DeviceType::CUDA,
                    [](c10::Stream stream) { return is_cuda_capturing(c10::cuda::CUDAStream(stream)); });
  return true;
}();

class CudaStreams final : public CommStreams {
 public:
  explicit CudaStreams(c10::Device device) : device_(device) {}

  c10::Device device() const override { return device_; }
  StreamHandle make_stream(StreamPriority priority) override {
    return c10::cuda::getStreamFromPool(priority == StreamPriority::kHigh, device_.index()).stream();
  }
  StreamHandle current() override { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }
  std::shared_ptr<StreamEvent> record(StreamHandle stream) override {
    return std::make_shared<CudaEvent>(pool_, named(stream));
  }
  void wait(StreamHandle stream, const StreamEvent& event) override {
    static_cast<const CudaEvent&>(event).block(named(stream));
  }
  bool is_capturing(StreamHandle stream) override { return is_cuda_capturing(stream); }

 private:
  c10::Stream named(StreamHandle stream) const {
    return c10::cuda::getStreamFromExternal(stream, device_.index()).unwrap();
  }

  c10::Device device_;
  std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>();
};

void stall_cuda_stream(c10::Stream stream, std::chrono::microseconds duration) {
  int kilohertz = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, stream.device_index()));
  const c10::StreamGuard on_stream(stream);
  at::cuda::sleep(duration.count() * kilohertz / 1000);
}

}  // namespace

StreamStall cuda_stream_stall() { return &stall_cuda_stream; }

std::shared_ptr<CommStreams> cuda_streams(c10::Device device) { return std::make_shared<CudaStreams>(device); }

}  // namespace fsdp
