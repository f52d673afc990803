#include "checkpoint/plan/rank_group.hpp"

#include <catch2/catch.hpp>

#include "fsdp/checkpoint_parts.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {
namespace {

TEST_CASE("an error of one rank is every rank's, with who it was", "[checkpoint][rank_group]") {
  CHECK(on_ranks(3, [](Rank& rank) {
    const RankGroup ranks(rank.world(), "save_checkpoint");
    rank.check_throws<CheckpointError>([&] {
      ranks.together([&] { if (rank.index() == 1) throw std::runtime_error("the disk is full"); });
    }, {"rank 1: the disk is full"}, "one");
    rank.check_throws<UsageError>([&] {
      ranks.together([&] { throw UsageError(rank.index() == 1 ? "this" : "that"); });
    }, {"ranks 0, 2: that", "rank 1: this"}, "all, differently");
    rank.check_throws<UsageError>([&] { ranks.together([] { throw UsageError("the same"); }); }, {"the same"}, "all");
    rank.check_throws<CheckpointError>([&] {
      ranks.on_first([] { throw CheckpointError("gone"); });
    }, {"rank 0: gone"}, "the first");
    ranks.together([] {});
    rank.check_equal(ranks.broadcast(rank.index() == 0 ? "text" : "other"), std::string("text"), "goes on");
  }));
}

TEST_CASE("texts of any length are gathered from all", "[checkpoint][rank_group]") {
  CHECK(on_ranks(3, [](Rank& rank) {
    const RankGroup ranks(rank.world(), "save_checkpoint");
    rank.check_equal(ranks.all_gather(std::string(rank.index() * 5, 'x')), std::vector<std::string>{"", "xxxxx", "xxxxxxxxxx"}, "texts");
    rank.check_equal(ranks.all_gather(std::string()), std::vector<std::string>(3), "empty ones");
    rank.check_equal(ranks.all_gather(std::vector<int64_t>{rank.index(), 7}),
                     std::vector<std::vector<int64_t>>{{0, 7}, {1, 7}, {2, 7}}, "numbers");
  }));
}

}  // namespace
}  // namespace fsdp::test
