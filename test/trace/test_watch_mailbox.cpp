#include <catch2/catch.hpp>

#include "trace/desync/watch_mailbox.hpp"

namespace fsdp::test {
namespace {

constexpr auto kNotAtAll = std::chrono::milliseconds(0);
/// Nobody waits for so long: what is waited for is there.
constexpr auto kUntilItIsThere = std::chrono::milliseconds(3'600'000);

}  // namespace

TEST_CASE("a thread that has returned has done so for good, and one that is to end is asked once", "[group][watch_mailbox]") {
  for (size_t s = 0; s < kWatchStateCount; ++s) {
    CAPTURE(s);
    const auto state = static_cast<WatchState>(s);
    CHECK(transition(state, WatchEvent::kReturned) == WatchState::kHasEnded);
    CHECK(transition(state, WatchEvent::kAsked) ==
          (state == WatchState::kHasEnded ? WatchState::kHasEnded : WatchState::kIsToEnd));
  }
}

TEST_CASE("what is posted wakes whoever waits, until it is taken", "[group][watch_mailbox]") {
  WatchMailbox mailbox;
  CHECK(mailbox.await(kNotAtAll));
  mailbox.post_step({.count = 2, .hash = 20});
  mailbox.post_step({.count = 3, .hash = 30});
  CHECK(mailbox.await(kUntilItIsThere));
  const auto steps = mailbox.take_steps();
  REQUIRE(steps.size() == 2);
  CHECK(steps[0].hash == 20);
  CHECK(steps[1].hash == 30);
  CHECK(mailbox.take_steps().empty());
  CHECK(mailbox.take_beginnings().empty());
  mailbox.post_beginnings({{.group = "layer0", .params = {}, .hashes = {}}});
  CHECK(mailbox.await(kUntilItIsThere));
  REQUIRE(mailbox.take_beginnings().size() == 1);
  CHECK(mailbox.take_beginnings().empty());
  CHECK(mailbox.await(kNotAtAll));
}

TEST_CASE("a thread that is to end hears of it at once, whatever else is there", "[group][watch_mailbox]") {
  WatchMailbox mailbox;
  mailbox.post_step({.count = 1, .hash = 10});
  CHECK_FALSE(mailbox.end(kNotAtAll));  // it has not returned yet
  CHECK_FALSE(mailbox.await(kUntilItIsThere));
  mailbox.note_returned();
  CHECK(mailbox.end(kUntilItIsThere));
}

TEST_CASE("nobody waits for a thread that has returned by itself", "[group][watch_mailbox]") {
  WatchMailbox mailbox;
  mailbox.note_returned();
  CHECK(mailbox.end(kUntilItIsThere));
  CHECK(mailbox.end(kUntilItIsThere));
}

}  // namespace fsdp::test
