#include <catch2/catch.hpp>

#include "trace/desync/standstill.hpp"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;
using HostPlace = HostActivity::Whereabouts;

const WatchTimes kTimes = {.late_after = milliseconds(600), .compare_after = milliseconds(50), .timeout = milliseconds(1200)};
const auto kBegin = Standstill::Clock::time_point() + std::chrono::hours(1);

/// A host that has been at one place for so long.
Standstill still_for(milliseconds length, HostPlace place, const WatchTimes& times = kTimes) {
  Standstill standstill(times, kBegin - std::chrono::minutes(1));
  standstill.follow({.number = 7, .place = place}, kBegin);
  standstill.follow({.number = 7, .place = place}, kBegin + length);
  return standstill;
}

}  // namespace

TEST_CASE("whether a host that does not move is suspicious, or late, depends on where it is and for how long",
          "[group][standstill]") {
  struct Row {
    HostPlace place;
    int length_ms;
    bool is_suspicious, is_late;
  };
  const std::vector<Row> rows = {
      {HostPlace::kInCollective, 0, false, false},   {HostPlace::kInCollective, 49, false, false},
      {HostPlace::kInCollective, 50, true, false},   {HostPlace::kInCollective, 599, true, false},
      {HostPlace::kInCollective, 600, true, true},   {HostPlace::kInStep, 50, false, false},
      {HostPlace::kInStep, 599, false, false},       {HostPlace::kInStep, 600, true, false},
      {HostPlace::kOutside, 600, false, false},      {HostPlace::kOutside, 1'000'000, false, false},
  };
  for (const auto& row : rows) {
    CAPTURE(static_cast<int>(row.place), row.length_ms);
    const auto standstill = still_for(milliseconds(row.length_ms), row.place);
    CHECK(standstill.is_suspicious() == row.is_suspicious);
    CHECK(standstill.is_late() == row.is_late);
  }
}

TEST_CASE("a collective can be late before the ranks are compared", "[group][standstill]") {
  const WatchTimes times = {.late_after = milliseconds(20), .compare_after = milliseconds(1000), .timeout = milliseconds(5000)};
  const auto standstill = still_for(milliseconds(20), HostPlace::kInCollective, times);
  CHECK(standstill.is_late());
  CHECK_FALSE(standstill.is_suspicious());
}

TEST_CASE("a host that has moved stands still anew, and nothing has been done about it", "[group][standstill]") {
  auto standstill = still_for(milliseconds(700), HostPlace::kInCollective);
  CHECK(standstill.since() == kBegin);
  standstill.note_posted();
  standstill.note_reported();
  for (int i = 0; i < 3; ++i) (void)standstill.is_look_due();
  // Still there.
  standstill.follow({.number = 7, .place = HostPlace::kInCollective}, kBegin + milliseconds(800));
  CHECK(standstill.is_posted());
  CHECK(standstill.is_reported());
  const auto later = kBegin + milliseconds(900);
  standstill.follow({.number = 9, .place = HostPlace::kInCollective}, later);
  CHECK(standstill.number() == 9);
  CHECK(standstill.since() == later);
  CHECK_FALSE(standstill.is_suspicious());
  CHECK_FALSE(standstill.is_posted());
  CHECK_FALSE(standstill.is_reported());
  CHECK(standstill.is_look_due());
}

TEST_CASE("the end of a step is seen at the same standstill", "[group][standstill]") {
  auto standstill = still_for(milliseconds(700), HostPlace::kInStep);
  CHECK(standstill.is_suspicious());
  standstill.follow({.number = 7, .place = HostPlace::kOutside}, kBegin + milliseconds(800));
  CHECK_FALSE(standstill.is_suspicious());
}

TEST_CASE("the others are asked more and more seldom, and never less than every 16th time", "[group][standstill]") {
  Standstill standstill(kTimes, kBegin);
  std::vector<int> asked;
  for (int look = 1; look <= 80; ++look)
    if (standstill.is_look_due()) asked.push_back(look);
  CHECK(asked == std::vector<int>{1, 2, 4, 8, 16, 32, 48, 64, 80});
}

TEST_CASE("ranks settle for as long as a collective may take, between a tenth of a second and two", "[group][standstill]") {
  const auto settling = [](int late_ms) {
    return WatchTimes{.late_after = milliseconds(late_ms), .compare_after = {}, .timeout = {}}.settling().count();
  };
  CHECK(settling(10) == 100);
  CHECK(settling(700) == 700);
  CHECK(settling(30'000) == 2000);
  CHECK(kTimes.between_polls() == milliseconds(50));
}

}  // namespace fsdp::test
