#include <catch2/catch.hpp>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/bounded_calls.hpp"
#include "comm/bounded_store.hpp"
#include "comm/notice_board.hpp"
#include "support/patience.hpp"
#include "support/silent_store.hpp"

// A rank that is cut off from the rendezvous store: no call waits for it for ever.

namespace fsdp::test {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;

const std::vector<uint8_t> kValue = {1, 2};

/// Calls until the store is given up no longer.
void await_mended(c10d::Store& store) {
  const auto end = std::chrono::steady_clock::now() + patience();
  for (;;) try {
      return store.set("again", kValue);
    } catch (const NoAnswer&) {
      if (std::chrono::steady_clock::now() > end) throw;
      std::this_thread::sleep_for(milliseconds(1));
    }
}

}  // namespace

TEST_CASE("calls of a store that does not answer come back, and work once it can be reached again",
          "[comm][bounded_store]") {
  const auto inner = c10::make_intrusive<SilentStore>();
  const auto store = bounded_store(inner, milliseconds(100));
  inner->setTimeout(milliseconds(100));
  store->set("key", kValue);
  CHECK(store->get("key") == kValue);

  inner->cut();
  CHECK_THROWS_AS(store->set("key", kValue), NoAnswer);
  CHECK_THROWS_AS(store->get("key"), NoAnswer);
  CHECK_THROWS_AS(store->check({"key"}), NoAnswer);
  CHECK_THROWS_WITH(store->compareSet("key", "1", "2"),
                    Contains("the rendezvous store has not answered") && Contains("cut off"));

  inner->mend();
  await_mended(*store);
  CHECK(store->check({"again"}));
}

TEST_CASE("after one call that was given up the next ones are not even begun", "[comm][bounded_store]") {
  BoundedCalls calls("nobody");
  std::promise<void> end;
  const auto ended = end.get_future().share();
  CHECK_THROWS_AS(calls.within(milliseconds(20), [ended] { ended.wait(); }), NoAnswer);
  const auto was_begun = std::make_shared<std::atomic<bool>>(false);
  CHECK_THROWS_AS(calls.within(std::chrono::hours(1), [was_begun] { *was_begun = true; }), NoAnswer);
  end.set_value();
  const auto give_up_at = std::chrono::steady_clock::now() + patience();
  for (;;) try {
      calls.within(std::chrono::hours(1), [] {});
      break;
    } catch (const NoAnswer&) {
      if (std::chrono::steady_clock::now() > give_up_at) throw;
      std::this_thread::sleep_for(milliseconds(1));
    }
  CHECK_FALSE(*was_begun);
}

TEST_CASE("a call that is bounded returns and throws what it would without a bound", "[comm][bounded_store]") {
  BoundedCalls calls("nobody");
  CHECK(calls.within(std::chrono::hours(1), [] { return std::string("answer"); }) == "answer");
  CHECK_THROWS_WITH(calls.within(std::chrono::hours(1), []() -> int { throw std::out_of_range("no such key"); }),
                    "no such key");
}

TEST_CASE("a key that nobody sets is waited for until the timeout, as without a bound", "[comm][bounded_store]") {
  const auto store = bounded_store(c10::make_intrusive<c10d::HashStore>(), std::chrono::hours(1));
  store->setTimeout(milliseconds(50));
  CHECK_THROWS_WITH(store->get("nobody's"), !Contains("has not answered"));
  CHECK_THROWS_WITH(store->wait({"nobody's"}, milliseconds(50)), !Contains("has not answered"));
}

TEST_CASE("a store is bounded once, below prefixes too", "[comm][bounded_store]") {
  const auto store = bounded_store(c10::make_intrusive<c10d::HashStore>());
  const c10::intrusive_ptr<c10d::Store> prefixed =
      c10::make_intrusive<c10d::PrefixStore>("a", c10::make_intrusive<c10d::PrefixStore>("b", store));
  CHECK(bounded_store(prefixed) == prefixed);
}

TEST_CASE("a board waits no longer for a store whose other calls may", "[comm][bounded_store][notice_board]") {
  const auto inner = c10::make_intrusive<SilentStore>();
  const auto store = c10::make_intrusive<c10d::PrefixStore>("world", bounded_store(inner, std::chrono::hours(1)));
  const auto board = store_notice_board(store, milliseconds(100));
  board->post("a", "note");
  CHECK(board->read("a") == "note");
  inner->cut();
  CHECK_THROWS_AS(board->read("a"), NoAnswer);
  inner->mend();
}

TEST_CASE("a board gives up a store that does not answer", "[comm][bounded_store][notice_board]") {
  const auto inner = c10::make_intrusive<SilentStore>();
  const auto board = store_notice_board(inner, milliseconds(100));
  board->post("a", "note");
  inner->cut();
  CHECK_THROWS_AS(board->post("a", "other"), NoAnswer);
  CHECK_THROWS_AS(board->read("a"), NoAnswer);
  CHECK_THROWS_AS(board->post_first("b", "first"), NoAnswer);
  inner->mend();
}

}  // namespace fsdp::test
