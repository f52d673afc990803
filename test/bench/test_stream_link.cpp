// The communicator of all_gather_overlap over a stream: what it moves, what it asks of the device, and in which order.
#include "stream_link.hpp"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <numeric>

namespace fsdp::bench {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

/// A device of nothing but streams, which writes down what is asked of them.
struct WrittenStreams final : c10::impl::DeviceGuardImplInterface {
  mutable std::vector<std::string> lines;
  mutable c10::StreamId current = 0, made = 0;
  mutable int64_t events = 0;

  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++made); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current, next.id())); }

  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(++events);
    lines.push_back(fmt::format("event {} on stream {}", events, on.id()));
  }
  void block(void* event, const c10::Stream& on) const override {
    lines.push_back(fmt::format("stream {} waits for event {}", on.id(), reinterpret_cast<int64_t>(event)));
  }
  bool queryEvent(void*) const override { return false; }
};

const WrittenStreams& written_streams() {
  static const auto* streams = new WrittenStreams;
  static const c10::impl::DeviceGuardImplRegistrar registrar(kDevice, streams);
  return *streams;
}

/// Nodes of two ranks, of which this is the second one.
SimulatedNetwork two_nodes() {
  return {.world_size = 4,
          .rank = 1,
          .latency_us = 2,
          .bandwidth_gb_per_s = 3,
          .launch_us = 1,
          .nodes = {.ranks = 2, .latency_us = 5, .bandwidth_gb_per_s = 1},
          .log = std::make_shared<std::vector<SimulatedTransfer>>()};
}

struct OnTheHost {
  SimulatedNetwork network = two_nodes();
  std::vector<double> spins;
  std::shared_ptr<Communicator> world = stream_link(
      {.network = network, .device = c10::Device(c10::kCPU), .spin = [this](double us) { spins.push_back(us); }});
};

/// Every kind of collective, over the world and over a group of it.
void communicate(Communicator& world) {
  const auto whole = at::zeros({4000}), piece = at::zeros({1000});
  world.start_all_gather(whole, piece, "layer")->wait();
  world.start_reduce_scatter(piece, whole, ReduceOp::kSum, "layer")->wait();
  world.start_all_reduce(whole, ReduceOp::kSum, "norm")->wait();
  world.start_broadcast(piece, 0, "first")->wait();
  const std::vector<at::Tensor> wholes{whole, whole}, pieces{piece, piece};
  world.start_all_gather_batch(wholes, pieces, "layers")->wait();
  world.start_reduce_scatter_batch(pieces, wholes, ReduceOp::kSum, "layers")->wait();
  const auto node = world.split(std::vector<int>{0, 1}, "node");
  node->start_all_gather(at::zeros({2000}), piece, "layer")->wait();
}

}  // namespace

TEST_CASE("a gather over a stream brings this rank's own piece to its place, and nobody else's", "[bench][stream_link]") {
  const OnTheHost link;
  const auto whole = at::full({8}, -1.0), piece = at::arange(1, 3, at::kFloat);
  const auto work = link.world->start_all_gather(whole, piece, "layer");
  work->wait();
  CHECK(work->is_completed());
  CHECK(at::equal(whole, at::tensor({-1.0, -1.0, 1.0, 2.0, -1.0, -1.0, -1.0, -1.0}, at::kFloat)));
}

TEST_CASE("a reduction over a stream takes this rank's own piece for the sum", "[bench][stream_link]") {
  const OnTheHost link;
  const auto whole = at::arange(8, at::kFloat), piece = at::zeros({2});
  link.world->start_reduce_scatter(piece, whole, ReduceOp::kSum, "layer")->wait();
  CHECK(at::equal(piece, at::tensor({2.0, 3.0}, at::kFloat)));
}

TEST_CASE("collectives over a stream take as long as those of the simulated network alone", "[bench][stream_link]") {
  OnTheHost link;
  communicate(*link.world);
  SimulatedNetwork network = two_nodes();
  network.clock = virtual_clock();
  communicate(*simulated_network(network));

  std::vector<double> alone;
  for (const auto& transfer : *network.log) alone.push_back(transfer.alone_us);
  CHECK(link.spins == alone);
  // A ring of four over two nodes: two steps of 2 us and one of 5, and three quarters of 16,000 bytes at 2 GB/s.
  CHECK(alone.front() == Approx(1 + 2 * 2 + 5 + 6));
  CHECK(alone.back() == Approx(1 + 2 + 4000.0 / 3000));

  REQUIRE(link.network.log->size() == alone.size());
  for (size_t i = 0; i < alone.size(); ++i) {
    CHECK((*link.network.log)[i].operation == (*network.log)[i].operation);
    CHECK((*link.network.log)[i].bytes == (*network.log)[i].bytes);
    CHECK((*link.network.log)[i].group == (*network.log)[i].group);
    CHECK((*link.network.log)[i].alone_us == alone[i]);
  }
}

TEST_CASE("a free link keeps no stream busy", "[bench][stream_link]") {
  int spins = 0;
  const auto world = stream_link(
      {.network = {.world_size = 2}, .device = c10::Device(c10::kCPU), .spin = [&](double) { ++spins; }});
  world->start_all_gather(at::zeros({2}), at::ones({1}), "layer")->wait();
  CHECK(spins == 0);
}

TEST_CASE("collectives begin behind the current stream, follow each other beside it, and are waited for by it alone",
          "[bench][stream_link]") {
  const auto& streams = written_streams();
  streams.lines.clear();
  const auto world = stream_link({.network = {.world_size = 2, .latency_us = 7},
                                  .device = streams.getDevice(),
                                  .spin = [&](double us) {
                                    streams.lines.push_back(fmt::format("{} us on stream {}", us, streams.current));
                                  }});
  const auto group = world->split(std::vector<int>{0, 1}, "reduce_scatter");
  const auto whole = at::zeros({2}), piece = at::ones({1});

  const auto gather = world->start_all_gather(whole, piece, "layer");
  const auto reduction = group->start_reduce_scatter(piece, whole, ReduceOp::kSum, "layer");
  CHECK_FALSE(gather->is_completed());
  reduction->wait();

  CHECK(world->device_type() == kDevice);
  CHECK(streams.current == 0);
  CHECK(streams.lines == std::vector<std::string>{"event 1 on stream 0", "stream 1 waits for event 1",
                                                  "7 us on stream 1", "event 2 on stream 1",
                                                  "event 3 on stream 0", "stream 1 waits for event 3",
                                                  "7 us on stream 1", "event 4 on stream 1",
                                                  "stream 0 waits for event 4"});
}

}  // namespace fsdp::bench
