#include "base/require.hpp"
#include "comm/forwarding.hpp"
#include "comm/total_bytes.hpp"
#include "fsdp/simulated_network.hpp"
#include "fsdp/testing/recording.hpp"

namespace fsdp {
namespace {

class RecordingCommunicator final : public ForwardingCommunicator {
 public:
  RecordingCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<CallLog> log)
      : ForwardingCommunicator(std::move(inner)), log_(std::move(log)) {}

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    record("all_gather", subject, {&output, 1});
    return ForwardingCommunicator::start_all_gather(output, input, subject);
  }

  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op, std::string_view subject) override {
    record("reduce_scatter", subject, {&input, 1});
    return ForwardingCommunicator::start_reduce_scatter(output, input, op, subject);
  }

  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                         std::string_view subject) override {
    record("all_reduce", subject, {&tensor, 1});
    return ForwardingCommunicator::start_all_reduce(tensor, op, subject);
  }

  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                        std::string_view subject) override {
    record("broadcast", subject, {&tensor, 1});
    return ForwardingCommunicator::start_broadcast(tensor, root, subject);
  }

  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    if (launches_batches()) record("all_gather", subject, outputs);
    return ForwardingCommunicator::start_all_gather_batch(outputs, inputs, subject);
  }

  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    if (launches_batches()) record("reduce_scatter", subject, inputs);
    return ForwardingCommunicator::start_reduce_scatter_batch(outputs, inputs, op, subject);
  }

  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs,
                                                    double scale,
                                                    std::string_view subject) override {
    record("reduce_scatter", subject, inputs);
    return ForwardingCommunicator::start_scaled_reduce_scatter(outputs, inputs, scale, subject);
  }

  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    record("all_reduce", subject, {&tensor, 1});
    return ForwardingCommunicator::start_scaled_all_reduce(tensor, scale, subject);
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                      const std::string& name) override {
    auto group = inner().split(ranks, name);
    return group ? recording(std::move(group), log_) : nullptr;
  }

 private:
  void record(const char* operation, std::string_view subject, std::span<const at::Tensor> full) {
    log_->calls.push_back({.operation = operation,
                           .subject = std::string(subject),
                           .group = name(),
                           .bytes = total_bytes(full),
                           .tensors = static_cast<int>(full.size())});
  }

  std::shared_ptr<CallLog> log_;
};

}  // namespace

std::vector<std::string> CallLog::names() const {
  std::vector<std::string> names;
  names.reserve(calls.size());
  for (const RecordedCall& call : calls) names.push_back(call.operation + " " + call.subject);
  return names;
}

std::shared_ptr<Communicator> recording(std::shared_ptr<Communicator> inner,
                                        std::shared_ptr<CallLog> log) {
  require(inner != nullptr && log != nullptr,
          "recording: expected a communicator and a log, found null");
  return std::make_shared<RecordingCommunicator>(std::move(inner), std::move(log));
}

}  // namespace fsdp
