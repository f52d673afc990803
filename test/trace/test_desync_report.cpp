#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "trace/desync/desync_report.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;
using RankState = RankReport::State;

/// A schedule of operations by name, each hash over all before it.
RankReport report(int rank, const std::vector<std::string>& texts, RankState state = RankState::kOutside,
                  uint64_t first = 0) {
  RankReport report{.rank = rank, .state = state};
  report.window.first = first;
  uint64_t hash = 1;
  for (const auto& text : texts) {
    for (const char c : text) hash = hash * 31 + static_cast<unsigned char>(c);
    report.window.entries.push_back({hash, text});
  }
  return report;
}

}  // namespace

TEST_CASE("a report survives the way over a store, whatever modules are called",
          "[group][desync_report]") {
  auto sent = report(3, {"all_gather of a", "reduce_scatter of odd\nname"}, RankState::kInCollective, 7);
  sent.waits_for = "all_gather of a\tb";
  const auto arrived = RankReport::decode(sent.encode());
  REQUIRE(arrived.has_value());
  CHECK(arrived->rank == 3);
  CHECK(arrived->state == RankState::kInCollective);
  CHECK(arrived->waits_for == "all_gather of a b");
  CHECK(arrived->window.first == 7);
  REQUIRE(arrived->count() == 9);
  CHECK(arrived->at(7).text == "all_gather of a");
  CHECK(arrived->at(8).text == "reduce_scatter of odd name");
  CHECK(arrived->at(8).hash == sent.at(8).hash);
  const auto empty = RankReport::decode(RankReport{.rank = 1}.encode());
  REQUIRE(empty.has_value());
  CHECK(empty->count() == 0);
  CHECK_FALSE(RankReport::decode("something else").has_value());
  CHECK_FALSE(RankReport::decode("").has_value());
}

TEST_CASE("the first difference is found; a rank that is behind does not differ",
          "[group][desync_report]") {
  const auto one = report(0, {"a", "b", "c"});
  CHECK_FALSE(find_difference(one, report(1, {"a", "b", "c"})).has_value());
  CHECK_FALSE(find_difference(one, report(1, {"a"})).has_value());
  CHECK_FALSE(find_difference(one, report(1, {})).has_value());
  const auto difference = find_difference(one, report(1, {"a", "x", "c", "d"}));
  REQUIRE(difference.has_value());
  CHECK(difference->index == 1);
  CHECK_FALSE(difference->is_older);
}

TEST_CASE("ranks that parted before what is kept are known to differ", "[group][desync_report]") {
  const auto difference = find_difference(report(0, {"a", "b"}, RankState::kOutside, 50),
                                          report(1, {"x", "b"}, RankState::kOutside, 50));
  REQUIRE(difference.has_value());
  CHECK(difference->index == 50);
  CHECK(difference->is_older);
  const RankReport both[] = {report(0, {"a", "b"}, RankState::kOutside, 50), report(1, {"x", "b"}, RankState::kOutside, 50)};
  CHECK_THAT(find_disagreement(both).value().text, Contains("collective 50 of their model, or one before it"));
}

TEST_CASE("the message shows each side's first different entry and what they had in common",
          "[group][desync_report]") {
  const RankReport reports[] = {report(0, {"a", "b", "c"}), report(1, {"a", "b", "x"}),
                                report(2, {"a", "b", "c", "d"}), report(3, {"a"}, RankState::kEnded),
                                report(4, {"a"})};
  const auto found = find_disagreement(reports);
  REQUIRE(found.has_value());
  CHECK(found->difference.collective == 2);
  CHECK(found->difference.launched == std::map<int, std::string>{{0, "c"}, {1, "x"}, {2, "c"},
                                                                 {3, "nothing more, its model is gone"}, {4, "nothing yet"}});
  CHECK_THAT(found->text, Contains("disagree about collective 2 of their model:\n  ranks 0, 2: c\n  rank 1: x\n"
                            "  rank 3: nothing more, its model is gone\n  rank 4: nothing yet\n"
                            "in common before it:\n  0: a\n  1: b\n"));
  const RankReport alike[] = {reports[0], reports[2], reports[3]};
  CHECK_FALSE(find_disagreement(alike).has_value());
}

TEST_CASE("what ranks do is said in a line for all that do the same, with the last ten collectives",
          "[group][desync_report]") {
  std::vector<std::string> texts;
  for (int i = 0; i < 12; ++i) texts.push_back(fmt::format("step{}", i));
  auto waiting = report(0, texts, RankState::kInCollective);
  waiting.waits_for = "all_gather of layer0";
  auto also_waiting = waiting;
  also_waiting.rank = 1;
  const RankReport reports[] = {waiting, also_waiting, report(2, {"step0"}), report(3, {}, RankState::kEnded)};
  const auto text = describe_ranks(reports, std::vector<int>{0, 1, 2, 3, 7});
  CHECK_THAT(text, Contains("ranks 0, 1: waits for all_gather of layer0; last launched 11: step11"));
  CHECK_THAT(text, Contains("rank 2: in no collective of this model; last launched 0: step0"));
  CHECK_THAT(text, Contains("rank 3: has ended, its model is gone; no collective launched"));
  CHECK_THAT(text, Contains("rank 7: gave no sign"));
  CHECK_THAT(text, Contains("the last collectives:\n  2: step2\n") && Contains("\n  11: step11"));
  CHECK_THAT(text, !Contains("  1: step1\n"));
}

TEST_CASE("ranks are listed in runs", "[group][desync_report]") {
  CHECK(list_ranks({3}) == "rank 3");
  CHECK(list_ranks({4, 2, 0, 3, 7, 8}) == "ranks 0, 2-4, 7, 8");
}

}  // namespace fsdp::test
