#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/bounded_store.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

class GroupPlace;
class RankWatch;

/// Where the ranks of a world leave notes for each other, outside of any collective.
///
/// Thread-safe. Calls throw what the store behind them throws: its server may be gone.
class NoticeBoard : public std::enable_shared_from_this<NoticeBoard> {
 public:
  virtual ~NoticeBoard() = default;

  /// Takes the place of an earlier note of that key.
  virtual void post(const std::string& key, const std::string& note) = 0;
  /// Posts unless there is a note already; returns the one that is there now. Not empty.
  virtual std::string post_first(const std::string& key, const std::string& note) = 0;
  /// Never waits for a note to appear.
  virtual std::optional<std::string> read(const std::string& key) = 0;
  /// How long the ranks wait for each other before they give up.
  virtual std::chrono::milliseconds timeout() const = 0;

  /// How often it was asked for this name before: 0, 1, 2... Local, nothing is posted.
  int number(const std::string& name);

  /// What this process tells others for that rank of the world, on this board too.
  std::shared_ptr<RankWatch> rank_watch(int rank);

 protected:
  virtual std::shared_ptr<RankWatch> find_watch(int rank);

 private:
  std::mutex local_mutex_;  // of what is not posted
  std::map<std::string, int> numbers_;
  std::map<int, std::shared_ptr<RankWatch>> watches_;
};

/// A communicator that reaches the board of the world that it was split from.
class HasNoticeBoard {
 public:
  /// Null if there is none.
  virtual std::shared_ptr<NoticeBoard> notice_board() = 0;
  /// See group_place.hpp. Null if there is no board.
  virtual std::shared_ptr<GroupPlace> place() = 0;

 protected:
  ~HasNoticeBoard() = default;
};

/// The board of the group's world; null where the ranks share none (one rank, a simulated network, a
/// backend that came without a store).
std::shared_ptr<NoticeBoard> notice_board_of(Communicator& group);

/// A board for ranks that are threads of this process, who share the object.
std::shared_ptr<NoticeBoard> thread_notice_board(std::chrono::milliseconds timeout);

/// A board in a store of c10d, over a connection of its own. One object for each rank. Its calls throw NoAnswer
/// (bounded_calls.hpp) where the store does not answer in time: a board may explain a failure, never hold it up.
std::shared_ptr<NoticeBoard> store_notice_board(c10::intrusive_ptr<c10d::Store> store,
                                                std::chrono::milliseconds answers_within = kStoreAnswersWithin);

}  // namespace fsdp
