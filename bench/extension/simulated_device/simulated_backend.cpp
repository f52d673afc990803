#include "extension/simulated_device/simulated_backend.hpp"

#include <c10/core/StreamGuard.h>

#include "extension/simulated_device/simulated_device.hpp"

namespace fsdp::bench {
namespace {

class StreamWork final : public c10d::Work {
 public:
  StreamWork(SimulatedStreams::Moment end, c10::Stream stream, std::vector<at::Tensor> results)
      : end_(std::move(end)), stream_(stream), results_(std::move(results)) {}

  bool isCompleted() override { return simulated_streams().is_done(*end_); }
  bool isSuccess() const override { return true; }
  void synchronize() override { simulated_streams().wait(number_of(current_simulated_stream()), end_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  std::vector<at::Tensor> result() override { return results_; }
  /// It is complete at once; who takes its value lets the current stream wait for the collective's.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::StreamGuard guard(stream_);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector{stream_.device()});
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  SimulatedStreams::Moment end_;
  c10::Stream stream_;
  std::vector<at::Tensor> results_;
};

}  // namespace

SimulatedBackend::SimulatedBackend(int rank, int size, const SimulatedRing& ring)
    : Backend(rank, size),
      ring_(ring),
      queue_(simulated_streams().add_queue()),
      stream_(simulated_streams().add_stream()) {}

c10::intrusive_ptr<c10d::Work> SimulatedBackend::start(const char* name, const std::vector<at::Tensor>& full,
                                                       double passes, bool is_async) {
  auto& streams = simulated_streams();
  const c10::Stream current = current_simulated_stream();
  const c10::Stream stream = is_async ? c10::Stream(c10::Stream::UNSAFE, current.device(), static_cast<c10::StreamId>(stream_))
                                      : current;
  if (is_async) streams.wait(stream_, streams.record(number_of(current)));
  double bytes = 0;
  for (const auto& tensor : full) bytes += static_cast<double>(tensor.nbytes());
  auto end = streams.collective(number_of(stream), queue_, ring_.launch_us + passes * ring_.ring_us,
                                passes * bytes * ring_.us_per_byte, bytes, name);
  return c10::make_intrusive<StreamWork>(std::move(end), stream, full);
}

c10::intrusive_ptr<c10d::Work> SimulatedBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                           const c10d::BroadcastOptions& options) {
  return start("broadcast", tensors, 1, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> SimulatedBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                           const c10d::AllreduceOptions& options) {
  return start("all_reduce", tensors, ring_.all_reduce_passes, options.asyncOp);
}

/// DDP compares the ranks' parameters so: all are as this one's.
c10::intrusive_ptr<c10d::Work> SimulatedBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                           std::vector<at::Tensor>& inputs,
                                                           const c10d::AllgatherOptions& options) {
  for (size_t i = 0; i < inputs.size(); ++i)
    for (auto& output : outputs[i]) output.copy_(inputs[i]);
  return start("all_gather", outputs[0], 1, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> SimulatedBackend::_allgather_base(at::Tensor& output, at::Tensor& /*input*/,
                                                                 const c10d::AllgatherOptions& options) {
  return start("all_gather", {output}, 1, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> SimulatedBackend::_reduce_scatter_base(at::Tensor& /*output*/, at::Tensor& input,
                                                                      const c10d::ReduceScatterOptions& options) {
  return start("reduce_scatter", {input}, ring_.reduce_passes, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> SimulatedBackend::barrier(const c10d::BarrierOptions& options) {
  return start("barrier", {}, 2, options.asyncOp);
}

}  // namespace fsdp::bench
