#include <catch2/catch.hpp>

#include <atomic>
#include <future>
#include <thread>

#include "fsdp/schedule_check_options.hpp"
#include "support/patience.hpp"
#include "trace/desync/desync_watcher.hpp"
#include "watched_rank.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;

constexpr auto kLongSettling = std::chrono::minutes(10);  // nothing here waits for it

}  // namespace

TEST_CASE("a rank that finds a difference gives a verdict, which the others take over", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2, kLongSettling), one(notices, 1, 2, kLongSettling);
  zero.gather(0);
  one.gather(1);
  one.post();
  CHECK_FALSE(one.inquiry.take_over_verdict());
  zero.inquiry.give_difference(zero.activity.report());
  CHECK_THAT(zero.told(), Contains("rank 0: all_gather of layer0") && Contains("rank 1: all_gather of layer1"));
  CHECK(zero.board.alarm() == "verdict of rank 0");
  CHECK(one.told().empty());
  CHECK(one.inquiry.take_over_verdict());
  CHECK(one.told() == zero.told());
}

TEST_CASE("ranks of which one is behind do not differ", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2, kLongSettling), one(notices, 1, 2, kLongSettling);
  for (const int group : {0, 1}) zero.gather(group);
  one.gather(0);
  one.post();
  zero.inquiry.give_difference(zero.activity.report());
  CHECK(zero.told().empty());
  CHECK_FALSE(zero.board.verdict().read());
}

TEST_CASE("a verdict does without ranks that say nothing in time, and says so", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 3), one(notices, 1, 3);
  zero.gather(0);
  one.gather(1);
  one.post();
  zero.inquiry.give_difference(zero.activity.report());
  CHECK_THAT(zero.told(), Contains("rank 1: all_gather of layer1"));
  CHECK_THAT(zero.told(), !Contains("rank 2: all_gather"));
}

TEST_CASE("a rank that looks for a difference takes another rank's verdict before its own", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 3, kLongSettling), one(notices, 1, 3, kLongSettling);
  zero.gather(0);
  one.gather(1);
  one.post();  // rank 2 has not said anything
  one.inquiry.give_verdict({.text = "found by rank 1"});
  zero.inquiry.give_difference(zero.activity.report());
  CHECK(zero.told() == "found by rank 1");
}

TEST_CASE("of two verdicts the first is everybody's", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2), one(notices, 1, 2);
  zero.inquiry.give_verdict({.text = "first"});
  one.inquiry.give_verdict({.text = "second"});
  CHECK(zero.told() == "first");
  CHECK(one.told() == "first");
}

TEST_CASE("a collective that fails where the ranks agree brings no verdict, and the others are asked where they are",
          "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2, kLongSettling), one(notices, 1, 2, kLongSettling);
  for (auto* rank : {&zero, &one}) rank->gather(0);
  one.post();
  zero.activity.set_failed();
  zero.inquiry.explain_failure(zero.activity.report());
  CHECK(zero.told().empty());
  CHECK(zero.board.alarm() == "rank 0 failed at 1");
  REQUIRE(one.board.report_of(0));
  CHECK(one.board.report_of(0)->state == RankReport::State::kFailed);
}

TEST_CASE("a collective that fails where the ranks differ brings the verdict", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2, kLongSettling), one(notices, 1, 2, kLongSettling);
  zero.gather(0);
  one.gather(1);
  one.post();
  zero.activity.set_failed();
  zero.inquiry.explain_failure(zero.activity.report());
  CHECK_THAT(zero.told(), Contains("rank 1: all_gather of layer1"));
}

TEST_CASE("a failed rank does not wait for one that has ended", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2, kLongSettling), one(notices, 1, 2, kLongSettling);
  zero.gather(0);
  one.post_as(RankReport::State::kEnded);
  zero.inquiry.explain_failure(zero.activity.report());
  CHECK(zero.told().empty());
}

TEST_CASE("what waits for ranks that have ended cannot complete", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 3), one(notices, 1, 3), two(notices, 2, 3);
  zero.gather(0);
  for (auto* rank : {&one, &two}) rank->post_as(RankReport::State::kEnded);
  zero.inquiry.give_gone(zero.activity.report());
  CHECK_THAT(zero.told(), Contains("have ended before the others; all_gather of layer0 cannot complete"));
  CHECK(one.inquiry.take_over_verdict());
  CHECK(one.told() == zero.told());
}

TEST_CASE("rank 0 waits until the others know the verdict or have ended", "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 3, kLongSettling), one(notices, 1, 3, kLongSettling), two(notices, 2, 3, kLongSettling);
  zero.inquiry.give_verdict({.text = "they disagree"});
  auto waits = std::async(std::launch::async, [&] { zero.inquiry.await_others(); });
  const auto has_returned = [&](std::chrono::milliseconds within) {
    return waits.wait_for(within) == std::future_status::ready;
  };
  two.post_as(RankReport::State::kEnded);
  CHECK_FALSE(has_returned(std::chrono::milliseconds(50)));
  CHECK(one.inquiry.take_over_verdict());
  CHECK(has_returned(patience()));
}

TEST_CASE("no rank waits for others for longer than they have to settle, and only rank 0 waits",
          "[group][desync_inquiry]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2), one(notices, 1, 2, kLongSettling);
  zero.inquiry.await_others();
  one.inquiry.await_others();
}

TEST_CASE("rank 0 throws a verdict once, and no sooner than the others know it", "[group][desync_watch]") {
  const auto notices = shared_board();
  WatchedRank one(notices, 1, 2);
  DesyncWatcher zero(std::make_shared<CollectiveLog>(), DesyncBoard(notices, "schedule", 0, first_ranks(2)),
                     {.late_after = kLongSettling, .compare_after = kLongSettling, .timeout = kLongSettling});
  CHECK_NOTHROW(zero.check());
  one.board.verdict().give({.text = "they disagree"});
  std::atomic<bool> one_knows = false;
  auto knew = std::async(std::launch::async, [&] {
    try {
      zero.explain_failure("");
      return false;
    } catch (const ScheduleError&) {
      return one_knows.load();
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  one_knows = true;
  CHECK(one.inquiry.take_over_verdict());
  CHECK(knew.get());
  CHECK_THROWS_AS(zero.check(), ScheduleError);
  CHECK_THROWS_WITH(zero.check(), "they disagree");
}

}  // namespace fsdp::test
