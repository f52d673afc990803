#include "stream_link.hpp"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

namespace fsdp::bench {

namespace {

using Log = std::vector<SimulatedTransfer>;

/// The device's side of a link, which all groups share.
class Lane {
 public:
  explicit Lane(const StreamLink& link) : device_(link.device), spin_(link.spin), log_(link.network.log) {
    if (!device_.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
  }

  c10::Device device() const { return device_; }

  /// Behind what is queued on the current stream: `carry`, and then the time of what it carried.
  template <class Carry>
  std::optional<c10::Event> occupy(const Carry& carry) {
    if (!stream_) {
      take(carry());
      return {};
    }
    c10::Event launched(device_.type()), done(device_.type());
    launched.record(current());
    launched.block(*stream_);
    const c10::StreamGuard beside(*stream_);
    take(carry());
    done.record(*stream_);
    return done;
  }

  c10::Stream current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

 private:
  void take(std::optional<SimulatedTransfer> transfer) {
    if (!transfer) return;
    spin_(transfer->alone_us);
    // Nobody knows when the device comes to it.
    transfer->start_ns = transfer->begin_ns = transfer->end_ns = 0;
    if (log_) log_->push_back(std::move(*transfer));
  }

  c10::Device device_;
  std::function<void(double)> spin_;
  std::shared_ptr<Log> log_;
  std::optional<c10::Stream> stream_;
};

class LaneWork final : public Work {
 public:
  LaneWork(std::shared_ptr<Lane> lane, std::optional<c10::Event> done)
      : lane_(std::move(lane)), done_(std::move(done)) {}

  void wait() override {
    if (done_) done_->block(lane_->current());
  }
  bool is_completed() override { return !done_ || done_->query(); }

 private:
  std::shared_ptr<Lane> lane_;
  std::optional<c10::Event> done_;
};

/// Has a simulated network carry each collective, on a clock of its own, to learn what it takes.
class StreamCommunicator final : public Communicator {
 public:
  StreamCommunicator(std::shared_ptr<Communicator> network, std::shared_ptr<Log> carried, std::shared_ptr<Lane> lane)
      : Communicator(network->rank(), network->ranks(), network->name()),
        network_(std::move(network)),
        carried_(std::move(carried)),
        lane_(std::move(lane)) {}

  c10::DeviceType device_type() const override { return lane_->device().type(); }
  std::string backend() const override { return "stream"; }
  bool launches_batches() const override { return network_->launches_batches(); }
  int64_t packs_below() const override { return network_->packs_below(); }

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    return carry([&] { return network_->start_all_gather(output, input, subject); });
  }

  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             std::string_view subject) override {
    return carry([&] { return network_->start_reduce_scatter(output, input, op, subject); });
  }

  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view subject) override {
    return carry([&] { return network_->start_all_reduce(tensor, op, subject); });
  }

  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root, std::string_view subject) override {
    return carry([&] { return network_->start_broadcast(tensor, root, subject); });
  }

  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs, std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    return carry([&] { return network_->start_all_gather_batch(outputs, inputs, subject); });
  }

  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    return carry([&] { return network_->start_reduce_scatter_batch(outputs, inputs, op, subject); });
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    auto group = network_->split(ranks, name);
    return group ? std::make_shared<StreamCommunicator>(std::move(group), carried_, lane_) : nullptr;
  }

  void abort(const std::string& reason) override { network_->abort(reason); }

 private:
  template <class Start>
  std::shared_ptr<Work> carry(const Start& start) {
    return std::make_shared<LaneWork>(lane_, lane_->occupy([&]() -> std::optional<SimulatedTransfer> {
      carried_->clear();
      start()->wait();
      if (carried_->empty()) return {};  // a free network tells of nothing
      return carried_->back();
    }));
  }

  std::shared_ptr<Communicator> network_;
  std::shared_ptr<Log> carried_;
  std::shared_ptr<Lane> lane_;
};

}  // namespace

std::shared_ptr<Communicator> stream_link(const StreamLink& link) {
  auto carried = std::make_shared<Log>();
  SimulatedNetwork network = link.network;
  network.clock = virtual_clock();
  network.log = carried;
  network.moves_own_bytes = true;
  return std::make_shared<StreamCommunicator>(simulated_network(network), carried, std::make_shared<Lane>(link));
}

}  // namespace fsdp::bench
