#include <catch2/catch.hpp>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <filesystem>
#include <set>

#include "comm/c10d/c10d_communicator.hpp"
#include "comm/debug/fake_collectives.hpp"
#include "comm/notice_board.hpp"
#include "comm/watch/group_place.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/simulated_network.hpp"
#include "fsdp/testing/recording.hpp"
#include "rank_results.hpp"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

/// Two ranks' boards of one world.
struct Boards {
  std::string name;
  std::shared_ptr<NoticeBoard> one, other;
};

std::vector<Boards> all_boards(const std::string& path, milliseconds timeout = beyond_patience()) {
  std::vector<Boards> boards;
  const auto threads = thread_notice_board(timeout);
  boards.push_back({"threads", threads, threads});
  const auto add = [&](const char* name, c10::intrusive_ptr<c10d::Store> store) {
    store->setTimeout(timeout);
    boards.push_back({name, store_notice_board(store), store_notice_board(store)});
  };
  add("hash", c10::make_intrusive<c10d::HashStore>());
  add("file", c10::make_intrusive<c10d::FileStore>(path, 1));
  c10d::TCPStoreOptions tcp;
  tcp.isServer = true;
  tcp.port = 0;
  add("tcp", c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp));
  return boards;
}

}  // namespace

TEST_CASE("a note is what was posted last, and reading never waits", "[comm][notice_board]") {
  const auto path = unused_path();
  const auto timeout = beyond_patience();
  for (const auto& [name, one, other] : all_boards(path, timeout)) {
    CAPTURE(name);
    const auto begin = std::chrono::steady_clock::now();
    CHECK_FALSE(other->read("a").has_value());
    CHECK(std::chrono::steady_clock::now() - begin < patience());
    one->post("a", "first");
    CHECK(other->read("a") == "first");
    other->post("a", "second\nline");
    CHECK(one->read("a") == "second\nline");
    CHECK_FALSE(one->read("b").has_value());
    CHECK(one->timeout() == timeout);
  }
  std::filesystem::remove(path);
}

TEST_CASE("the first of several verdicts is everybody's", "[comm][notice_board]") {
  const auto path = unused_path();
  for (const auto& [name, one, other] : all_boards(path)) {
    CAPTURE(name);
    CHECK(one->post_first("verdict", "mine") == "mine");
    CHECK(other->post_first("verdict", "also mine") == "mine");
    CHECK(other->read("verdict") == "mine");
  }
  std::filesystem::remove(path);
}

TEST_CASE("a group and what is split off it reach the board of their world", "[comm][notice_board]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<std::string> read(4);
    const auto errors = backend.run(4, [&](Communicator& world) {
      const auto even = world.split(std::vector<int>{0, 2}, "even");
      const auto odd = world.split(std::vector<int>{1, 3}, "odd");
      const auto group = recording(world.rank() % 2 ? odd : even, std::make_shared<CallLog>());
      const auto board = notice_board_of(*group);
      if (!board) throw std::logic_error("no board");
      if (world.rank() == 3) board->post("greeting", "from 3");
      all_reduce(world, at::ones({1}));
      read[static_cast<size_t>(world.rank())] = board->read("greeting").value_or("");
    });
    CHECK(errors == no_errors(4));
    CHECK(read == std::vector<std::string>(4, "from 3"));
  }
}

TEST_CASE("ranks that share nothing have no board", "[comm][notice_board]") {
  CHECK(notice_board_of(*single_rank()) == nullptr);
  CHECK(notice_board_of(*simulated_network({.world_size = 4})) == nullptr);
}

TEST_CASE("a board counts how often a name was asked for", "[comm][notice_board]") {
  const auto board = thread_notice_board(milliseconds(1));
  CHECK(board->number("a") == 0);
  CHECK(board->number("a") == 1);
  CHECK(board->number("b") == 0);
}

TEST_CASE("over gloo, ranks whose collectives differ in size wait instead of ending the process",
          "[comm][notice_board][gloo]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_on_gloo(
      2,
      [](Communicator& world) {
        if (world.rank() == 0)
          all_gather(world, at::zeros({8}), at::ones({4}), "short");
        else
          all_gather(world, at::zeros({800}), at::ones({400}), "long");
      },
      on_this_machine(milliseconds(1500)));
  CHECK(std::chrono::steady_clock::now() - begin < patience());
  for (const auto& error : errors) CHECK_FALSE(error.empty());
}

TEST_CASE("a group's place is the same on all its ranks and beside it, and another one for each split", "[comm][notice_board]") {
  std::vector<std::vector<std::string>> paths(4);
  run_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    auto& own = paths[static_cast<size_t>(world->rank())];
    own.push_back(place_of(*world)->path());
    std::shared_ptr<Communicator> row;
    for (int round = 0; round < 2; ++round)
      for (const auto& ranks : {std::vector<int>{0, 1}, std::vector<int>{2, 3}})
        if (auto group = world->split(ranks, "shard")) {
          row = std::move(group);
          own.push_back(place_of(*row)->path());
        }
    own.push_back(place_of(*row->split(std::vector<int>{0, 1}, "reduce"))->path());
    own.push_back(place_of(*world->split(std::vector<int>{0, 1, 2, 3}, "shard"))->path());
  });
  for (const auto& of_rank : paths) {
    CHECK(of_rank == paths[0]);
    CHECK(std::set<std::string>(of_rank.begin(), of_rank.end() - 1).size() == of_rank.size() - 1);
  }
  CHECK(paths[0] == std::vector<std::string>{"", "/shard#0", "/shard#1", "/shard#1/reduce#0", "/shard#0"});
}

}  // namespace fsdp::test
