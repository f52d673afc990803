#include <catch2/catch.hpp>

#include "trace/desync/late_check.hpp"
#include "watched_rank.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;

const WatchTimes kLateTimes = {.late_after = milliseconds(600), .compare_after = milliseconds(50), .timeout = milliseconds(1200)};

/// A rank that gathers layer 0, and its check, which has seen it do that `still` ago.
struct LateRank : WatchedRank {
  LateRank(const std::shared_ptr<NoticeBoard>& notices, int rank, int ranks, milliseconds still)
      : WatchedRank(notices, rank, ranks), late(kLateTimes, activity, board, inquiry) {
    gather(0);
    const auto now = Standstill::Clock::now();
    late.follow(now - still);
    late.follow(now);
  }
  LateCheck late;
};

}  // namespace

TEST_CASE("a host that waits is suspicious first and late then", "[group][late_check]") {
  const auto notices = shared_board();
  LateRank moving(notices, 0, 2, milliseconds(0)), waiting(notices, 0, 2, milliseconds(100)),
      late(notices, 0, 2, milliseconds(1000));
  CHECK_FALSE(moving.late.is_suspicious());
  CHECK(waiting.late.is_suspicious());
  CHECK_FALSE(waiting.late.is_late());
  CHECK(late.late.is_late());
}

TEST_CASE("a rank that asks posts its report and raises the alarm, once while the host does not move", "[group][late_check]") {
  const auto notices = shared_board();
  LateRank zero(notices, 0, 2, milliseconds(100));
  zero.late.ask();
  REQUIRE(zero.board.report_of(0));
  CHECK(zero.board.report_of(0)->waits_for == "all_gather of layer0");
  const auto alarm = zero.board.alarm();
  CHECK_THAT(alarm.value_or(""), Contains("rank 0 waits at 1, "));
  zero.board.raise_alarm("another");
  zero.late.ask();
  CHECK(zero.board.alarm() == "another");
  zero.activity.leave();
  zero.activity.enter(Operation::kAllGather, 0);
  zero.late.follow(Standstill::Clock::now());
  zero.late.ask();
  CHECK(zero.board.alarm() != "another");
  CHECK(zero.board.alarm() != alarm);  // each has a text of its own
}

TEST_CASE("a rank that asks finds who differs, and a verdict that is there already", "[group][late_check]") {
  const auto notices = shared_board();
  WatchedRank one(notices, 1, 3);
  one.gather(1);
  one.post();
  LateRank zero(notices, 0, 3, milliseconds(100));
  zero.late.ask();
  CHECK_THAT(zero.told(), Contains("rank 1: all_gather of layer1"));
  LateRank two(notices, 2, 3, milliseconds(100));
  two.late.ask();
  CHECK(two.told() == zero.told());
  CHECK_FALSE(two.board.report_of(2));  // it need not say anything any more
}

TEST_CASE("who waits for a rank that has ended is told once its collective is late", "[group][late_check]") {
  const auto notices = shared_board();
  WatchedRank one(notices, 1, 2);
  one.post_as(RankReport::State::kEnded);
  LateRank waiting(notices, 0, 2, milliseconds(100));
  waiting.late.ask();
  CHECK(waiting.told().empty());
  LateRank late(notices, 0, 2, milliseconds(1000));
  late.late.ask();
  CHECK_THAT(late.told(), Contains("rank 1 has ended before the others; all_gather of layer0 cannot complete"));
}

TEST_CASE("one rank of all warns of a collective that is late, and each of them once", "[group][late_check]") {
  const auto notices = shared_board();
  LateRank zero(notices, 0, 3, milliseconds(7000)), one(notices, 1, 3, milliseconds(9000));
  CHECK_FALSE(zero.late.has_warned());
  zero.late.warn();
  CHECK(zero.late.has_warned());
  CHECK_FALSE(zero.late.is_late());
  one.late.warn();
  CHECK(one.late.has_warned());
  CHECK_THAT(one.board.late().value_or(""), Contains("all_gather of layer0 is late: rank 0 has waited 7.") &&
                                                Contains("rank 0: waits for all_gather of layer0"));
  CHECK(zero.told().empty());
}

}  // namespace fsdp::test
