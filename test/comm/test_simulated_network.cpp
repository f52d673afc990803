#include "fsdp/simulated_network.hpp"

#include <catch2/catch.hpp>

#include <map>
#include <thread>

#include "fsdp/error.hpp"
#include "rank_results.hpp"

namespace fsdp::test {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// A network on a clock of its own, whose time is modelled exactly; and the same one in real time, where a busy machine
/// may wake a thread late, but never early.
void check_takes(double milliseconds, const SimulatedNetwork& network,
                 const std::function<void(const std::shared_ptr<Communicator>& world)>& body) {
  auto modelled = network;
  modelled.clock = virtual_clock();
  body(simulated_network(modelled));
  CHECK(1e-6 * static_cast<double>(modelled.clock->now_ns()) == milliseconds);
  const auto world = simulated_network(network);
  const auto begin = Clock::now();
  body(world);
  CHECK(milliseconds_since(begin) >= milliseconds);
}

}  // namespace

TEST_CASE("a collective takes W - 1 steps of latency and W-ths of the buffer",
          "[comm][simulated_network]") {
  // 3 steps x (10 ms + 1 MB / 4 ranks / 0.05 GB/s = 5 ms) = 45 ms.
  const SimulatedNetwork network{.world_size = 4, .latency_us = 10'000, .bandwidth_gb_per_s = 0.05};
  const at::Tensor whole = at::zeros({1'000'000}, at::kByte);
  const at::Tensor piece = at::zeros({250'000}, at::kByte);
  check_takes(45, network, [&](const auto& world) { all_gather(*world, whole, piece); });
  check_takes(45, network, [&](const auto& world) { reduce_scatter(*world, piece, whole); });
  check_takes(90, network, [&](const auto& world) { all_reduce(*world, whole); });  // a reduction, then a gather
}

TEST_CASE("collectives of one communicator follow each other, those of another overlap",
          "[comm][simulated_network]") {
  const SimulatedNetwork network{.world_size = 2, .latency_us = 40'000};
  const at::Tensor tensor = at::zeros({2});
  check_takes(80, network, [&](const auto& world) {
    const auto first = world->start_all_gather(tensor, at::zeros({1}), "first");
    const auto second = world->start_all_gather(tensor, at::zeros({1}), "second");
    second->wait();
    CHECK(first->is_completed());
  });
  check_takes(40, network, [&](const auto& world) {
    const auto other = world->split(std::vector<int>{0, 1}, "other");
    const auto here = world->start_all_gather(tensor, at::zeros({1}), "here");
    const auto there = other->start_all_gather(tensor, at::zeros({1}), "there");
    there->wait();
    here->wait();
  });
}

/// Two communicators over one link, on a clock of their own.
struct TwoQueues {
  explicit TwoQueues(SimulatedNetwork network) {
    network.world_size = 2;
    network.clock = clock;
    network.log = log;
    gathers = simulated_network(network);
    reductions = gathers->split(std::vector<int>{0, 1}, "reductions");
  }
  std::shared_ptr<Work> gather(std::string_view subject, int64_t numel = 2) const {
    return gathers->start_all_gather(at::zeros({numel}), at::zeros({numel / 2}), subject);
  }
  std::shared_ptr<Work> reduce(std::string_view subject, int64_t numel = 2) const {
    return reductions->start_reduce_scatter(at::zeros({numel / 2}), at::zeros({numel}), ReduceOp::kSum, subject);
  }
  /// In microseconds, by subject: from the beginning to the end.
  std::map<std::string, std::pair<double, double>> times() const {
    std::map<std::string, std::pair<double, double>> result;
    for (const auto& transfer : *log)
      result[transfer.subject] = {1e-3 * static_cast<double>(transfer.begin_ns), 1e-3 * static_cast<double>(transfer.end_ns)};
    return result;
  }
  std::shared_ptr<SimulatedClock> clock = virtual_clock();
  std::shared_ptr<std::vector<SimulatedTransfer>> log = std::make_shared<std::vector<SimulatedTransfer>>();
  std::shared_ptr<Communicator> gathers, reductions;
};

TEST_CASE("a collective holds back what another communicator starts next, and what is behind that",
          "[comm][simulated_network]") {
  const TwoQueues queues({.latency_us = 10});
  const std::vector works = {queues.gather("first"), queues.reduce("free")};
  CHECK(works[0]->hold_back(*queues.reductions));
  CHECK(queues.clock->now_ns() == 0);
  const std::vector later = {queues.gather("second"), queues.reduce("held"), queues.reduce("behind")};
  for (const auto& work : {works[0], works[1], later[2], later[1], later[0]}) work->wait();
  const std::map<std::string, std::pair<double, double>> expected = {
      {"first", {0, 10}}, {"second", {10, 20}}, {"free", {0, 10}}, {"held", {10, 20}}, {"behind", {20, 30}}};
  CHECK(queues.times() == expected);
}

TEST_CASE("what is held back takes no bandwidth, and gets its share once it begins", "[comm][simulated_network]") {
  // 4 bytes of 8 travel, at 1 byte in a nanosecond.
  const TwoQueues queues({.bandwidth_gb_per_s = 1e-3});
  const auto first = queues.gather("first", 2), second = queues.gather("second", 4);
  CHECK(first->hold_back(*queues.reductions));
  const auto held = queues.reduce("held", 2);
  for (const auto& work : {second, held, first}) work->wait();
  // From 4 us on two of them share: 8 us for the 4 bytes of one, then the other is alone with 4 bytes more.
  const std::map<std::string, std::pair<double, double>> expected = {
      {"first", {0, 4}}, {"held", {4, 12}}, {"second", {4, 16}}};
  CHECK(queues.times() == expected);
}

TEST_CASE("what is done holds nothing back, and another network cannot be held back", "[comm][simulated_network]") {
  const TwoQueues queues({.latency_us = 10});
  const auto gather = queues.gather("gather");
  gather->wait();
  CHECK(gather->hold_back(*queues.reductions));
  queues.reduce("reduction")->wait();
  CHECK(queues.times()["reduction"] == std::pair(10.0, 20.0));
  const auto elsewhere = simulated_network({.world_size = 2, .latency_us = 10});
  CHECK_FALSE(gather->hold_back(*elsewhere));
  const auto free = simulated_network({.world_size = 2});
  CHECK(free->start_all_gather(at::zeros({2}), at::zeros({1}), "free")->hold_back(*queues.reductions));
}

TEST_CASE("time passes while the host does something else", "[comm][simulated_network]") {
  const auto clock = virtual_clock();
  const auto world = simulated_network({.world_size = 2, .latency_us = 30'000, .clock = clock});
  const auto work = world->start_all_gather(at::zeros({2}), at::zeros({1}), "block");
  CHECK_FALSE(work->is_completed());
  clock->wait_until(31'000'000);
  CHECK(work->is_completed());
  work->wait();
  work->wait();
  CHECK(clock->now_ns() == 31'000'000);

  const auto real = simulated_network({.world_size = 2, .latency_us = 30'000});
  const auto later = real->start_all_gather(at::zeros({2}), at::zeros({1}), "block");
  std::this_thread::sleep_for(std::chrono::milliseconds(31));
  CHECK(later->is_completed());
}

TEST_CASE("a free network is done at once, always with the same Work",
          "[comm][simulated_network]") {
  const auto world = simulated_network({.world_size = 1000, .rank = 7});
  const at::Tensor whole = at::zeros({1000});
  const auto first = world->start_all_gather(whole, at::ones({1}), "block");
  const auto second = world->start_all_reduce(whole, ReduceOp::kSum, "block");
  CHECK(first->is_completed());
  CHECK(first == second);
}

TEST_CASE("a rank's own bytes are moved to where they belong", "[comm][simulated_network]") {
  const auto world = simulated_network({.world_size = 3, .rank = 1});
  const at::Tensor gathered = at::zeros({6});
  all_gather(*world, gathered, at::tensor({7, 8}, at::kFloat));
  CHECK(at::equal(gathered, at::tensor({0, 0, 7, 8, 0, 0}, at::kFloat)));
  const at::Tensor reduced = at::zeros({2});
  reduce_scatter(*world, reduced, at::arange(6).to(at::kFloat));
  CHECK(at::equal(reduced, at::tensor({2, 3}, at::kFloat)));

  const std::vector<at::Tensor> wholes = {at::zeros({3}), at::zeros({6})};
  const std::vector<at::Tensor> pieces = {at::ones({1}), at::ones({2})};
  world->start_all_gather_batch(wholes, pieces, "batch")->wait();
  CHECK(at::equal(wholes[0], at::tensor({0, 1, 0}, at::kFloat)));
  CHECK(at::equal(wholes[1], at::tensor({0, 0, 1, 1, 0, 0}, at::kFloat)));
}

TEST_CASE("without moves_own_bytes buffers are left alone", "[comm][simulated_network]") {
  const auto world = simulated_network({.world_size = 2, .moves_own_bytes = false});
  const at::Tensor whole = at::full({2}, 5.0F);
  all_gather(*world, whole, at::ones({1}));
  CHECK(at::equal(whole, at::full({2}, 5.0F)));
}

TEST_CASE("an aborted network fails what is pending and what comes", "[comm][simulated_network]") {
  const auto world = simulated_network({.world_size = 2, .latency_us = 1000});
  const auto pending = world->start_all_reduce(at::ones({1}), ReduceOp::kSum, "pending");
  world->abort("enough");
  CHECK_THROWS_AS(pending->wait(), CommError);
  CHECK_THROWS_WITH(world->start_all_reduce(at::ones({1}), ReduceOp::kSum, "later"),
                    Catch::Contains("'later'") && Catch::Contains("enough"));
}

TEST_CASE("a network that makes no sense is rejected", "[comm][simulated_network]") {
  CHECK_THROWS_AS(simulated_network({.world_size = 0}), UsageError);
  CHECK_THROWS_AS(simulated_network({.world_size = 2, .rank = 2}), UsageError);
  CHECK_THROWS_AS(simulated_network({.world_size = 2, .latency_us = -1}), UsageError);
}

}  // namespace fsdp::test
