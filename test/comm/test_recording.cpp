#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/simulated_network.hpp"
#include "fsdp/testing/recording.hpp"
#include "rank_results.hpp"

namespace fsdp::test {

TEST_CASE("a recording lists what was started, for whom and how large", "[comm][recording]") {
  const auto log = std::make_shared<CallLog>();
  const auto world = recording(simulated_network({.world_size = 2}), log);
  const at::Tensor whole = at::zeros({4});
  const at::Tensor piece = at::zeros({2});
  all_gather(*world, whole, piece, "blocks.0");
  reduce_scatter(*world, piece, whole, ReduceOp::kSum, "blocks.0");
  all_reduce(*world, piece, ReduceOp::kMax, "norm");
  broadcast(*world, piece, 0, "seed");

  CHECK(log->names() == std::vector<std::string>{"all_gather blocks.0", "reduce_scatter blocks.0",
                                                 "all_reduce norm", "broadcast seed"});
  CHECK(log->calls[0].bytes == 16);  // the gathered buffer, not the piece
  CHECK(log->calls[1].bytes == 16);
  CHECK(log->calls[2].bytes == 8);
  CHECK(log->calls[0].group == "world");
  CHECK(log->calls[0].tensors == 1);
  log->clear();
  CHECK(log->calls.empty());
}

TEST_CASE("a batch is recorded as one call of several tensors", "[comm][recording]") {
  const auto log = std::make_shared<CallLog>();
  const auto world = recording(simulated_network({.world_size = 2}), log);
  CHECK(world->launches_batches());
  const std::vector<at::Tensor> wholes = {at::zeros({4}), at::zeros({2}, at::kByte)};
  const std::vector<at::Tensor> pieces = {at::zeros({2}), at::zeros({1}, at::kByte)};
  world->start_all_gather_batch(wholes, pieces, "b")->wait();
  world->start_reduce_scatter_batch(pieces, wholes, ReduceOp::kSum, "b")->wait();
  CHECK(log->names() == std::vector<std::string>{"all_gather b", "reduce_scatter b"});
  for (const RecordedCall& call : log->calls) {
    CHECK(call.tensors == 2);
    CHECK(call.bytes == 18);
  }
}

TEST_CASE("groups that are split off record into the same log, under their names",
          "[comm][recording]") {
  const auto log = std::make_shared<CallLog>();
  const auto world = recording(simulated_network({.world_size = 4, .rank = 2}), log);
  const auto pair = world->split(std::vector<int>{2, 3}, "pair");
  CHECK(world->split(std::vector<int>{0, 1}, "others") == nullptr);
  all_reduce(*pair, at::ones({1}), ReduceOp::kSum, "norm");
  REQUIRE(log->calls.size() == 1);
  CHECK(log->calls[0].group == "pair[2,3]");
}

TEST_CASE("a recording changes no values and shows what it wraps", "[comm][recording]") {
  std::vector<float> sums(2);
  run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const auto recorded = recording(world, std::make_shared<CallLog>());
    const at::Tensor sum = at::full({1}, recorded->rank() + 1.0F);
    all_reduce(*recorded, sum);
    sums[recorded->rank()] = recorded->backend() == "threads" ? sum.item<float>() : -1;
  });
  CHECK(sums == std::vector<float>{3, 3});
}

TEST_CASE("a recording needs something to wrap and somewhere to write", "[comm][recording]") {
  CHECK_THROWS_AS(recording(nullptr, std::make_shared<CallLog>()), UsageError);
  CHECK_THROWS_AS(recording(single_rank(), nullptr), UsageError);
}

}  // namespace fsdp::test
