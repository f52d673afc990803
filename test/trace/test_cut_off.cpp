#include <catch2/catch.hpp>

#include <future>

#include "fsdp/schedule_check.hpp"
#include "trace/desync/desync_watch.hpp"
#include "support/patience.hpp"
#include "support/silent_store.hpp"

// A rank whose board cannot be reached any more, while a collective of it fails.

namespace fsdp::test {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;

/// More than any bound, and less than for ever.
constexpr auto kHangs = std::chrono::seconds(60);

/// Rank 1 of 2, which waits for its first all-gather.
struct CutOffRank {
  c10::intrusive_ptr<SilentStore> store = c10::make_intrusive<SilentStore>();
  std::shared_ptr<CollectiveLog> log = std::make_shared<CollectiveLog>();
  std::unique_ptr<DesyncWatch> watch;

  explicit CutOffRank(milliseconds compare_after) {
    log->introduce(0, "layer0", {"weight"});
    watch = std::make_unique<DesyncWatch>(
        log, DesyncBoard(store_notice_board(store, milliseconds(300)), "schedule", 1, {0, 1}),
        WatchTimes{.late_after = milliseconds(200), .compare_after = compare_after, .timeout = milliseconds(500)});
    log->note({.operation = Operation::kAllGather, .ranks = 2, .group = 0, .bytes = 64});
    (*watch)->enter(Operation::kAllGather, 0);
  }
  ~CutOffRank() { store->mend(); }
};

}  // namespace

TEST_CASE("a rank that is cut off from its board explains a failure with what it knows itself", "[group][cut_off]") {
  // The watching thread is in a call that hangs, or has not called yet.
  for (const auto compare_after : {milliseconds(20), milliseconds(3'600'000)}) {
    CAPTURE(compare_after.count());
    CutOffRank rank(compare_after);
    rank.store->cut();
    auto explained = std::async(std::launch::async, [&] { return (*rank.watch)->explain_failure(""); });
    const bool has_come_back = explained.wait_for(kHangs) == std::future_status::ready;
    rank.store->mend();
    REQUIRE(has_come_back);
    CHECK_THAT(explained.get(), Contains("the rendezvous store has not answered") &&
                                    Contains("rank 1: has failed; last launched 0: all_gather of layer0") &&
                                    !Contains("rank 0"));
  }
}

TEST_CASE("a rank that is cut off from its board is not held up when its model goes", "[group][cut_off]") {
  CutOffRank rank(milliseconds(20));
  rank.store->cut();
  auto gone = std::async(std::launch::async, [&] { rank.watch.reset(); });
  const bool has_gone = gone.wait_for(kHangs) == std::future_status::ready;
  rank.store->mend();
  CHECK(has_gone);
}

TEST_CASE("the check goes on where its board is reached again", "[group][cut_off]") {
  CutOffRank rank(milliseconds(20));
  rank.store->cut();
  CHECK_THAT((*rank.watch)->explain_failure(""), Contains("has not answered"));  // by now calls are given up
  rank.store->mend();
  const auto other = store_notice_board(rank.store);
  other->post("schedule/verdict", "the ranks disagree");
  other->post("schedule/alarm", "verdict of rank 0");
  std::string verdict;
  const auto end = std::chrono::steady_clock::now() + patience();
  while (verdict.empty() && std::chrono::steady_clock::now() < end) try {
      (*rank.watch)->check();
      std::this_thread::sleep_for(milliseconds(1));
    } catch (const ScheduleError& error) {
      verdict = error.what();
    }
  CHECK(verdict == "the ranks disagree");
}

}  // namespace fsdp::test
