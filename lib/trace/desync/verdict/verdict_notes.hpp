#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "comm/notice_board.hpp"
#include "trace/desync/verdict/verdict.hpp"

namespace fsdp {

/// The verdict on the board of the ranks' world, and which ranks know it. Thread-safe; throws what the board throws.
class VerdictNotes {
 public:
  /// prefix: of the root's keys.
  VerdictNotes(std::shared_ptr<NoticeBoard> board, std::string prefix, int rank)
      : board_(std::move(board)), prefix_(std::move(prefix)), rank_(rank) {}

  /// The first verdict is everybody's: returns it.
  Verdict give(const Verdict& verdict) {
    return Verdict::decode(board_->post_first(prefix_ + "/verdict", verdict.encode()));
  }
  std::optional<Verdict> read() {
    const auto note = board_->read(prefix_ + "/verdict");
    return note ? std::optional(Verdict::decode(*note)) : std::nullopt;
  }

  /// This rank knows the verdict.
  void note_known() { board_->post(known_key(rank_), "verdict"); }
  bool is_known_to(int rank) { return board_->read(known_key(rank)).has_value(); }

 private:
  std::string known_key(int rank) const { return prefix_ + "/knows verdict/" + std::to_string(rank); }

  std::shared_ptr<NoticeBoard> board_;
  std::string prefix_;
  int rank_;
};

}  // namespace fsdp
