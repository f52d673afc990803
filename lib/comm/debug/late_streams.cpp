#include "comm/debug/late_streams.hpp"

#include "base/side_stream.hpp"
#include "comm/debug/late_delivery.hpp"
#include "comm/debug/poison.hpp"
#include "comm/debug/stream_stall.hpp"
#include "comm/forwarding.hpp"

namespace fsdp {

namespace {

class LateStreams final : public ForwardingCommunicator {
 public:
  LateStreams(std::shared_ptr<Communicator> inner, std::chrono::microseconds max_delay, std::mt19937_64 random)
      : ForwardingCommunicator(std::move(inner)), max_delay_(max_delay), random_(random) {}

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    return start_all_gather_batch({&output, 1}, {&input, 1}, subject);
  }
  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    return start_late(inputs[0].device(), [&] {
      for (size_t i = 0; i < outputs.size(); ++i)
        if (!inputs[i].is_alias_of(outputs[i])) poison(outputs[i]);
      return outputs.size() == 1 ? inner().start_all_gather(outputs[0], inputs[0], subject)
                                 : inner().start_all_gather_batch(outputs, inputs, subject);
    });
  }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             std::string_view subject) override {
    return start_reduce_scatter_batch({&output, 1}, {&input, 1}, op, subject);
  }
  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    return start_late(inputs[0].device(), [&] {
      for (const auto& output : outputs) poison(output);
      return outputs.size() == 1 ? inner().start_reduce_scatter(outputs[0], inputs[0], op, subject)
                                 : inner().start_reduce_scatter_batch(outputs, inputs, op, subject);
    });
  }
  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs, double scale,
                                                    std::string_view subject) override {
    return start_late(inputs[0].device(), [&] {
      for (const auto& output : outputs) poison(output);
      return ForwardingCommunicator::start_scaled_reduce_scatter(outputs, inputs, scale, subject);
    });
  }
  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view subject) override {
    return start_late(tensor.device(), [&] { return inner().start_all_reduce(tensor, op, subject); });
  }
  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    return start_late(tensor.device(),
                      [&] { return ForwardingCommunicator::start_scaled_all_reduce(tensor, scale, subject); });
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    return inner().split(ranks, name);
  }

 private:
  /// Launches behind the current stream and the delay.
  template <class Launch>
  std::shared_ptr<Work> start_late(c10::Device device, const Launch& launch) {
    const auto beside = stream_.enter(device);
    const auto delay = draw_delay(random_, max_delay_);
    const auto stall = stream_stall(device.type());
    if (stall != nullptr && delay.count() > 0) stall(current_stream(device), delay);
    return launch();
  }

  const std::chrono::microseconds max_delay_;
  std::mt19937_64 random_;
  SideStream stream_;
};

}  // namespace

std::shared_ptr<Communicator> with_late_streams(std::shared_ptr<Communicator> inner,
                                                std::chrono::microseconds max_delay, std::mt19937_64 random) {
  return std::make_shared<LateStreams>(std::move(inner), max_delay, random);
}

}  // namespace fsdp
