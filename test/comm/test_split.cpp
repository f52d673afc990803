#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/simulated_network.hpp"
#include "rank_results.hpp"

namespace fsdp::test {

TEST_CASE("split groups reduce among their members only", "[comm][split]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<float> sums(4);
    std::vector<std::string> names(4);
    const auto errors = backend.run(4, [&](Communicator& world) {
      const auto low = world.split(std::vector<int>{0, 1}, "half");
      const auto high = world.split(std::vector<int>{2, 3}, "half");
      Communicator& mine = low ? *low : *high;
      if ((low != nullptr) == (high != nullptr))
        throw std::logic_error("a member of both, or none");
      const at::Tensor sum = at::full({1}, world.rank() + 1.0F);
      all_reduce(mine, sum);
      sums[world.rank()] = sum.item<float>();
      names[world.rank()] = mine.name();
    });
    CHECK(errors == no_errors(4));
    CHECK(sums == std::vector<float>{3, 3, 7, 7});
    CHECK(names == std::vector<std::string>{"half[0,1]", "half[0,1]", "half[2,3]", "half[2,3]"});
  }
}

TEST_CASE("a group's ranks stand in the order asked for, as ranks of the world", "[comm][split]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<std::vector<int>> ranks(4);
    std::vector<int> rank(4, -1);
    const auto errors = backend.run(4, [&](Communicator& world) {
      const auto odd = world.split(std::vector<int>{3, 2, 1}, "odd");
      if (!odd) return;
      // Ranks of the group that is split, not of the world: these are world ranks 1 and 3.
      const auto pair = odd->split(std::vector<int>{2, 0}, "pair");
      if (!pair) return;
      ranks[world.rank()] = pair->ranks();
      rank[world.rank()] = pair->rank();
    });
    CHECK(errors == no_errors(4));
    CHECK(ranks == std::vector<std::vector<int>>{{}, {1, 3}, {}, {1, 3}});
    CHECK(rank == std::vector<int>{-1, 0, -1, 1});
  }
}

TEST_CASE("groups of the same name and ranks are groups of their own", "[comm][split]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<std::vector<float>> sums(2);
    const auto errors = backend.run(2, [&](Communicator& world) {
      const std::vector<int> both = {0, 1};
      const auto first = world.split(both, "g");
      const auto second = world.split(both, "g");
      const at::Tensor a = at::ones({1});
      const at::Tensor b = at::full({1}, 5.0F);
      const auto work_a = first->start_all_reduce(a, ReduceOp::kSum, "a");
      const auto work_b = second->start_all_reduce(b, ReduceOp::kSum, "b");
      work_b->wait();
      work_a->wait();
      sums[world.rank()] = {a.item<float>(), b.item<float>()};
    });
    CHECK(errors == no_errors(2));
    CHECK(sums == std::vector<std::vector<float>>{{2, 10}, {2, 10}});
  }
}

TEST_CASE("a split rejects empty, unknown and repeated ranks by name", "[comm][split]") {
  const auto world = simulated_network({.world_size = 3});
  CHECK_THROWS_WITH(world->split(std::vector<int>{}, "none"),
                    "split of group 'world' into 'none': a group needs at least one rank");
  CHECK_THROWS_WITH(
      world->split(std::vector<int>{0, 3}, "far"),
      "split of group 'world' into 'far': 3 is not a rank of the group; expected 0 to 2");
  CHECK_THROWS_WITH(world->split(std::vector<int>{1, 1}, "twice"),
                    "split of group 'world' into 'twice': rank 1 is listed twice");
  CHECK_THROWS_AS(world->split(std::vector<int>{-1}, "negative"), UsageError);
}

TEST_CASE("ranks that split differently are all told so", "[comm][split]") {
  const auto errors = errors_on_threads(
      2,
      [](Communicator& world) {
        const std::vector<int> ranks = {world.rank(), 1 - world.rank()};
        const auto group = world.split(ranks, "pair");
        all_reduce(world, at::ones({1}));
      },
      beyond_patience());
  for (const std::string& error : errors) {
    CHECK_THAT(error, Catch::Contains("the ranks disagree about split 0"));
    CHECK_THAT(error, Catch::Contains("'pair[0,1]'"));
    CHECK_THAT(error, Catch::Contains("'pair[1,0]'"));
  }
}

TEST_CASE("the name of a large group is short", "[comm][split]") {
  const auto world = simulated_network({.world_size = 64});
  std::vector<int> ranks(64);
  for (int rank = 0; rank < 64; ++rank) ranks[rank] = rank;
  CHECK(world->split(ranks, "all")->name() == "all[0,1,..,63]");
  CHECK(world->split(ranks, "named[all]")->name() == "named[all]");
}

}  // namespace fsdp::test
