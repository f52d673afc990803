#include <catch2/catch.hpp>

#include "trace/desync/alarm_poll.hpp"
#include "watched_rank.hpp"

namespace fsdp::test {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);

struct PollingRank : WatchedRank {
  explicit PollingRank(const std::shared_ptr<NoticeBoard>& notices) : WatchedRank(notices, 0, 2) {}

  void look() { alarms.look(now); }
  uint64_t posted() { return board.report_of(0) ? board.report_of(0)->count() : 0; }

  AlarmPoll alarms{kInterval, activity, board, inquiry};
  AlarmPoll::Clock::time_point now = AlarmPoll::Clock::now();
};

}  // namespace

TEST_CASE("a rank says where it is once for each alarm", "[group][alarm_poll]") {
  PollingRank zero(shared_board());
  zero.gather(0);
  zero.look();
  CHECK(zero.posted() == 0);  // nobody has asked
  zero.board.raise_alarm("rank 1 waits at 1");
  zero.now += kInterval;
  zero.look();
  CHECK(zero.posted() == 1);
  zero.gather(1);
  zero.now += kInterval;
  zero.look();
  CHECK(zero.posted() == 1);
  zero.board.raise_alarm("rank 1 waits at 2");
  zero.now += kInterval;
  zero.look();
  CHECK(zero.posted() == 2);
}

TEST_CASE("the board is asked no sooner than it is time", "[group][alarm_poll]") {
  PollingRank zero(shared_board());
  zero.look();
  zero.gather(0);
  zero.board.raise_alarm("rank 1 waits at 1");
  zero.now += kInterval - std::chrono::milliseconds(1);
  zero.look();
  CHECK(zero.posted() == 0);
  zero.now += std::chrono::milliseconds(1);
  zero.look();
  CHECK(zero.posted() == 1);
}

TEST_CASE("a rank that waits for nothing hears of a verdict by the alarm", "[group][alarm_poll]") {
  const auto notices = shared_board();
  PollingRank zero(notices);
  WatchedRank one(notices, 1, 2);
  one.inquiry.give_verdict({.text = "they disagree"});
  zero.look();
  CHECK(zero.told() == "they disagree");
  CHECK(zero.posted() == 0);
}

}  // namespace fsdp::test
