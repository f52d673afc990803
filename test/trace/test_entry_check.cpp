#include <catch2/catch.hpp>

#include <future>
#include <stdexcept>

#include "support/patience.hpp"
#include "support/silent_store.hpp"
#include "trace/desync/entry_check.hpp"
#include "watched_rank.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;
constexpr auto kNoTime = std::chrono::milliseconds(0);

/// What rank 1 has come to.
void post_entry(WatchedRank& rank) {
  const auto position = rank.log->position();
  rank.board.post_hashes(DesyncBoard::Track::kCollectives, position.count, std::vector<uint64_t>{position.hash});
}

}  // namespace

TEST_CASE("an entry that all ranks have is compared without a word", "[group][entry_check]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2), one(notices, 1, 2);
  EntryCheck entries(zero.board, zero.verdict, kNoTime);
  for (const int group : {0, 1, 0}) {
    for (auto* rank : {&zero, &one}) rank->gather(group);
    post_entry(one);
    CHECK_NOTHROW(entries.compare(zero.log->position()));
  }
}

TEST_CASE("a peer that is one entry ahead still knows the one before", "[group][entry_check]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2), one(notices, 1, 2);
  EntryCheck ahead(one.board, one.verdict, kNoTime);
  for (const int group : {0, 1}) {
    one.gather(group);
    CHECK_THROWS(ahead.compare(one.log->position()));  // rank 0 is not there yet
  }
  zero.gather(0);
  EntryCheck behind(zero.board, zero.verdict, kNoTime);
  CHECK_NOTHROW(behind.compare(zero.log->position()));
}

TEST_CASE("a rank with another entry, and one that does not come, are named", "[group][entry_check]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2), one(notices, 1, 2);
  EntryCheck entries(zero.board, zero.verdict, kNoTime);
  zero.gather(0);
  CHECK_THROWS_WITH(entries.compare(zero.log->position()),
                    Contains("rank 1 has not come to collective 0 within 0 ms; TORCH_DISTRIBUTED_DEBUG=DETAIL"));
  one.gather(1);
  post_entry(one);
  CHECK_THROWS_WITH(entries.compare(zero.log->position()), Contains("rank 1 disagrees about collective 0"));
}

TEST_CASE("a board that does not answer for a while is asked again until the timeout", "[group][entry_check]") {
  const auto store = c10::make_intrusive<SilentStore>();
  WatchedRank zero(store_notice_board(store, std::chrono::milliseconds(20)), 0, 2);
  WatchedRank one(store_notice_board(store, beyond_patience()), 1, 2);
  for (auto* rank : {&zero, &one}) rank->gather(0);
  post_entry(one);
  store->cut();
  CHECK_THROWS_WITH(EntryCheck(zero.board, zero.verdict, kNoTime).compare(zero.log->position()),
                    Contains("it is not known whether rank 1 came to collective 0: the rendezvous store has not answered"));
  EntryCheck entries(zero.board, zero.verdict, std::chrono::minutes(10));
  auto compared = std::async(std::launch::async, [&] { entries.compare(zero.log->position()); });
  CHECK(compared.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout);
  store->mend();
  CHECK_NOTHROW(compared.get());
}

TEST_CASE("a board whose server has gone ends the wait, and the error says for whom it was", "[group][entry_check]") {
  struct : NoticeBoard {
    void post(const std::string&, const std::string&) override { throw std::runtime_error("Broken pipe\nframe #0"); }
    std::string post_first(const std::string&, const std::string& note) override { return note; }
    std::optional<std::string> read(const std::string&) override { return std::nullopt; }
    std::chrono::milliseconds timeout() const override { return std::chrono::minutes(10); }
  } gone;
  WatchedRank zero(std::shared_ptr<NoticeBoard>(std::shared_ptr<void>(), &gone), 0, 3);
  zero.gather(0);
  EntryCheck entries(zero.board, zero.verdict, std::chrono::minutes(10));
  CHECK_THROWS_WITH(entries.compare(zero.log->position()),
                    "it is not known whether ranks 1, 2 came to collective 0: Broken pipe");
}

TEST_CASE("a verdict ends the wait for an entry", "[group][entry_check]") {
  const auto notices = shared_board();
  WatchedRank zero(notices, 0, 2);
  EntryCheck entries(zero.board, zero.verdict, std::chrono::minutes(10));
  zero.gather(0);
  zero.verdict.give({.text = "they disagree"});
  CHECK_NOTHROW(entries.compare(zero.log->position()));  // it does not wait for rank 1
}

}  // namespace fsdp::test
