#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/notice_board.hpp"
#include "trace/desync/desync_report.hpp"
#include "trace/desync/verdict/verdict_notes.hpp"

namespace fsdp {

/// What the ranks of one root tell each other about their schedules, on the board of their world. A
/// few notes for each rank, written over; nothing but local names is kept here. Thread-safe; throws what
/// the board throws.
class DesyncBoard {
 public:
  /// Peers that are asked at a time: all of them in a small world, and never so many that a large one drowns the store.
  static constexpr size_t kPeersAtATime = 8;
  /// The longest pause between two looks for what a peer has not posted yet, which come more and more seldom.
  static constexpr std::chrono::milliseconds kLongestPause{1000};

  /// prefix: this root's own, the same on all its ranks. ranks: of the world, `rank` among them.
  DesyncBoard(std::shared_ptr<NoticeBoard> board, std::string prefix, int rank, std::vector<int> ranks)
      : board_(std::move(board)),
        prefix_(std::move(prefix)),
        rank_(rank),
        ranks_(std::move(ranks)),
        verdict_(board_, prefix_, rank) {}

  int rank() const { return rank_; }
  const std::vector<int>& ranks() const { return ranks_; }
  std::chrono::milliseconds timeout() const { return board_->timeout(); }
  std::shared_ptr<RankWatch> rank_watch() const { return board_->rank_watch(rank_); }
  /// Returns the `count` other ranks that follow this one from the `from`-th on, in a ring; fewer if there are.
  std::vector<int> peers(size_t from, size_t count) const;

  // --- a track of hashes, one for each number, which the ranks compare
  enum class Track { kSteps, kCollectives };
  /// hashes: of `number`, of the one before it, and so on.
  void post_hashes(Track track, uint64_t number, std::span<const uint64_t> hashes);
  enum class Answer { kNotYet, kSame, kOther, kNoMore };
  Answer compare(Track track, int peer, uint64_t number, uint64_t hash);

  // --- what the ranks began with
  void post_beginnings(const std::string& note) { board_->post(key("beginnings", rank_), note); }
  std::optional<std::string> beginnings_of(int rank) { return board_->read(key("beginnings", rank)); }
  /// True for the one rank that is to warn.
  bool claim_beginnings();

  // --- whole reports, where something may be wrong
  void post(const RankReport& report);
  std::optional<RankReport> report_of(int rank);
  /// Returns all reports that are there, `own` among them.
  std::vector<RankReport> reports(const RankReport& own);

  /// Asks all ranks to post their reports. Each alarm has a text of its own.
  void raise_alarm(const std::string& alarm) { board_->post(key("alarm"), alarm); }
  std::optional<std::string> alarm() { return board_->read(key("alarm")); }

  VerdictNotes& verdict() { return verdict_; }

  /// True for the one rank that is to report that entry `index` is late.
  bool claim_late(uint64_t index);
  void post_late(const std::string& text) { board_->post(key("late"), text); }
  std::optional<std::string> late() { return board_->read(key("late")); }

 private:
  std::string key(const std::string& name) const { return prefix_ + "/" + name; }
  std::string key(const std::string& name, int64_t number) const {
    return prefix_ + "/" + name + "/" + std::to_string(number);
  }
  std::string track_key(Track track, int rank) const {
    return key(track == Track::kSteps ? "steps" : "collectives", rank);
  }

  std::shared_ptr<NoticeBoard> board_;
  std::string prefix_;
  int rank_;
  std::vector<int> ranks_;
  VerdictNotes verdict_;
};

}  // namespace fsdp
