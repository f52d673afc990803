#include "fsdp/simulated_clock.hpp"

#include <ATen/ATen.h>

#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "fsdp/simulated_network.hpp"

namespace fsdp::test {
namespace {

/// Ten ranks over a network on which a collective of 10 bytes takes 9 us of sending beside its latency.
struct Simulation {
  explicit Simulation(SimulatedNetwork network) {
    network.clock = clock;
    network.log = log;
    world = simulated_network(network);
  }

  std::shared_ptr<Work> gather(Communicator& group, const char* subject) const {
    return group.start_all_gather(at::zeros({group.size()}, at::kByte), at::zeros({1}, at::kByte), subject);
  }
  std::shared_ptr<Communicator> all_again() const {
    std::vector<int> ranks(static_cast<size_t>(world->size()));
    for (int rank = 0; rank < world->size(); ++rank) ranks[static_cast<size_t>(rank)] = rank;
    return world->split(ranks, "again");
  }
  int64_t now_us() const { return clock->now_ns() / 1000; }
  void compute_us(int64_t us) const { clock->wait_until(clock->now_ns() + 1000 * us); }

  std::shared_ptr<SimulatedClock> clock = virtual_clock();
  std::shared_ptr<std::vector<SimulatedTransfer>> log = std::make_shared<std::vector<SimulatedTransfer>>();
  std::shared_ptr<Communicator> world;
};

constexpr double kByteAMicrosecond = 1e-3;  // GB/s

}  // namespace

TEST_CASE("a virtual clock moves when somebody waits, and never back", "[comm][simulated_clock]") {
  const auto clock = virtual_clock();
  CHECK(clock->now_ns() == 0);
  clock->wait_until(500);
  clock->wait_until(200);
  CHECK(clock->now_ns() == 500);
}

TEST_CASE("the real clock waits at least as long as it is told", "[comm][simulated_clock]") {
  const auto clock = real_clock();
  const int64_t begin = clock->now_ns();
  clock->wait_until(begin + 300'000);
  CHECK(clock->now_ns() - begin >= 300'000);
}

TEST_CASE("a collective hides behind what computes meanwhile, to the microsecond", "[comm][simulated_clock]") {
  const Simulation s({.world_size = 10, .bandwidth_gb_per_s = kByteAMicrosecond});
  const auto work = s.gather(*s.world, "block");
  s.compute_us(5);
  CHECK_FALSE(work->is_completed());
  work->wait();
  CHECK(s.now_us() == 9);
  const auto hidden = s.gather(*s.world, "block");
  s.compute_us(20);
  CHECK(hidden->is_completed());
  hidden->wait();
  CHECK(s.now_us() == 29);
}

TEST_CASE("a launch, steps within a node and steps between nodes each take their own time",
          "[comm][simulated_clock]") {
  // Eight ranks on two nodes: 6 steps of 2 us within, 1 of 30 us between, 5 us to launch.
  SimulatedNetwork network{.world_size = 8, .latency_us = 2};
  network.launch_us = 5;
  network.nodes.ranks = 4;
  network.nodes.latency_us = 30;
  const Simulation s(network);
  s.gather(*s.world, "all")->wait();
  CHECK(s.now_us() == 5 + 6 * 2 + 30);

  const auto node = s.world->split(std::vector<int>{0, 1, 2, 3}, "node");
  s.gather(*node, "node")->wait();
  CHECK(s.now_us() == 47 + 5 + 3 * 2);

  const auto across = s.world->split(std::vector<int>{0, 4}, "across");
  const at::Tensor sums = at::zeros({2}, at::kByte);
  across->start_all_reduce(sums, ReduceOp::kSum, "across")->wait();  // there and back
  CHECK(s.now_us() == 58 + 5 + 2 * 30);
}

TEST_CASE("a group with more ranks on a node has more ways out of it, up to what the node carries",
          "[comm][simulated_clock]") {
  SimulatedNetwork network{.world_size = 8, .bandwidth_gb_per_s = 3 * kByteAMicrosecond};
  network.nodes.ranks = 4;
  network.nodes.bandwidth_gb_per_s = kByteAMicrosecond;
  const Simulation s(network);
  s.gather(*s.world->split(std::vector<int>{0, 4}, "one way"), "one way")->wait();
  CHECK(s.clock->now_ns() == 1000);  // 1 byte at 1 byte/us
  s.gather(*s.world->split(std::vector<int>{0, 1, 4, 5}, "two ways"), "two ways")->wait();
  CHECK(s.clock->now_ns() == 1000 + 1500);  // 3 bytes at 2 bytes/us
  s.gather(*s.world, "four ways")->wait();
  CHECK(s.clock->now_ns() == 2500 + 2333);  // 7 bytes at 3 bytes/us, not 4
}

TEST_CASE("two groups share the bandwidth while both send, and only then", "[comm][simulated_clock]") {
  const Simulation s({.world_size = 10, .bandwidth_gb_per_s = kByteAMicrosecond});
  const auto again = s.all_again();
  const auto first = s.gather(*s.world, "first");  // 9 us alone
  s.compute_us(3);
  const auto second = s.gather(*again, "second");
  first->wait();
  CHECK(s.now_us() == 3 + 2 * 6);  // 6 us of its 9 at half the speed
  second->wait();
  CHECK(s.now_us() == 15 + 3);  // the other half alone
}

TEST_CASE("latencies of two groups pass beside each other", "[comm][simulated_clock]") {
  const Simulation s({.world_size = 10, .latency_us = 4});
  const auto again = s.all_again();
  const auto first = s.gather(*s.world, "first");
  const auto second = s.gather(*again, "second");
  first->wait();
  second->wait();
  CHECK(s.now_us() == 36);
}

TEST_CASE("groups within a node do not hinder those between nodes", "[comm][simulated_clock]") {
  SimulatedNetwork network{.world_size = 8, .bandwidth_gb_per_s = kByteAMicrosecond};
  network.nodes.ranks = 4;
  network.nodes.bandwidth_gb_per_s = kByteAMicrosecond;
  const Simulation s(network);
  const auto node = s.world->split(std::vector<int>{0, 1, 2, 3}, "node");
  const auto across = s.world->split(std::vector<int>{0, 4}, "across");
  const auto slow = s.gather(*node, "node");
  s.gather(*across, "across")->wait();
  CHECK(s.now_us() == 1);
  slow->wait();
  CHECK(s.now_us() == 3);
}

TEST_CASE("the log tells when each collective was launched, began and ended", "[comm][simulated_clock]") {
  const Simulation s({.world_size = 10, .bandwidth_gb_per_s = kByteAMicrosecond});
  const auto first = s.gather(*s.world, "first");
  s.compute_us(2);
  const auto second = s.gather(*s.world, "second");
  CHECK(s.log->empty());
  second->wait();
  first->wait();
  REQUIRE(s.log->size() == 2);
  const auto& late = s.log->front();
  CHECK(late.operation == "all_gather");
  CHECK(late.subject == "second");
  CHECK(late.bytes == 10);
  CHECK(late.alone_us == Approx(9));
  CHECK(late.start_ns == 2000);
  CHECK(late.begin_ns == 9000);  // behind the first one
  CHECK(late.end_ns == 18000);
}

TEST_CASE("nodes and launches that make no sense are rejected", "[comm][simulated_clock]") {
  CHECK_THROWS_AS(simulated_network({.launch_us = -1}), UsageError);
  CHECK_THROWS_AS(simulated_network({.nodes = {.ranks = -8}}), UsageError);
  CHECK_THROWS_AS(simulated_network({.nodes = {.ranks = 8, .latency_us = -1}}), UsageError);
}

}  // namespace fsdp::test
