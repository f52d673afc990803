// What is under way on a channel, and who lets go of its memory when: with events that the test sets.
#include <ATen/ATen.h>

#include <catch2/catch.hpp>

#include "comm/nccl/nccl_channel.hpp"
#include "comm/single_rank.hpp"

namespace fsdp::test {
namespace {

using Tensors = std::vector<at::Tensor>;
using Now = std::chrono::steady_clock;

struct SetEvent final : StreamEvent {
  bool is_done() const override {
    if (fails) throw std::runtime_error("the device is gone");
    return is_set;
  }
  bool is_set = false;
  bool fails = false;
};

/// A channel without NCCL: nothing is launched over its link.
struct Channel : NcclChannel {
  Channel() : NcclChannel("gathers", api, nullptr, NCCL_CONFIG_UNDEF_INT) {}

  std::shared_ptr<NcclFlight> start(const at::Tensor& tensor, bool is_captured = false) {
    auto flight = std::make_shared<NcclFlight>(NcclFlight{.info = {"all_gather", "layer0", *group, 8}});
    flight->is_captured = is_captured;
    begin(flight, {tensor});
    return flight;
  }
  std::shared_ptr<SetEvent> launched(NcclFlight& flight) {
    auto event = std::make_shared<SetEvent>();
    note_launched(flight, event);
    return event;
  }
  size_t settled() {
    Tensors unused;
    settle(unused);
    return unused.size();
  }

  static inline const NcclApi api = {};
  std::shared_ptr<Communicator> group = single_rank_on(c10::DeviceType::CPU);
};

}  // namespace

TEST_CASE("a channel lets go of what is done and nobody will wait for, in the order of launches", "[comm][nccl_channel]") {
  Channel channel;
  const auto tensor = at::zeros({2});
  auto first = channel.start(tensor), second = channel.start(tensor);
  CHECK(channel.settled() == 0);  // they are not on their stream yet
  const auto first_done = channel.launched(*first), second_done = channel.launched(*second);
  first.reset();
  second.reset();
  second_done->is_set = true;
  CHECK(channel.settled() == 0);
  CHECK(tensor.use_count() == 3);
  first_done->is_set = true;
  CHECK(channel.settled() == 2);
  CHECK(tensor.use_count() == 1);
  CHECK(channel.oldest() == nullptr);
}

TEST_CASE("what somebody will wait for is let go of by the wait", "[comm][nccl_channel]") {
  Channel channel;
  const auto tensor = at::zeros({2});
  const auto flight = channel.start(tensor);
  channel.launched(*flight)->is_set = true;
  CHECK(channel.settled() == 0);
  CHECK(channel.oldest() == nullptr);  // it is done all the same
  CHECK(tensor.use_count() == 2);
  channel.let_go(*flight);
  CHECK(tensor.use_count() == 1);
}

TEST_CASE("a channel is quiet when its last launch is done", "[comm][nccl_channel]") {
  Channel channel;
  CHECK(channel.is_quiet());
  const auto flight = channel.start(at::zeros({2}));
  CHECK_FALSE(channel.is_quiet());
  const auto done = channel.launched(*flight);
  CHECK_FALSE(channel.is_quiet());
  CHECK(channel.oldest() == flight);
  done->is_set = true;
  CHECK(channel.is_quiet());
}

TEST_CASE("what a graph has captured is not under way", "[comm][nccl_channel]") {
  Channel channel;
  const auto flight = channel.start(at::zeros({2}), /*is_captured=*/true);
  channel.launched(*flight)->fails = true;
  CHECK(channel.oldest() == nullptr);
  CHECK(channel.is_quiet());
  CHECK(flight->tensors.size() == 1);
}

TEST_CASE("at the end of a channel what is done is freed, and so is what a broken device will never run",
          "[comm][nccl_channel]") {
  for (const bool fails : {false, true}) {
    Channel channel;
    const auto tensor = at::zeros({2});
    {
      const auto flight = channel.start(tensor);
      const auto event = channel.launched(*flight);
      event->is_set = !fails;
      event->fails = fails;
    }
    CHECK(channel.finish(Now::now() + std::chrono::minutes(10)) == 0);
    CHECK(tensor.use_count() == 1);
  }
}

TEST_CASE("at the end of a channel what is never done keeps its memory", "[comm][nccl_channel]") {
  const auto tensor = at::zeros({2});
  {
    Channel channel;
    channel.launched(*channel.start(tensor));
    CHECK(channel.finish(Now::now() - std::chrono::seconds(1)) == 1);
  }
  CHECK(tensor.use_count() == 2);
}

}  // namespace fsdp::test
