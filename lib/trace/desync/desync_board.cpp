#include "trace/desync/desync_board.hpp"

#include <algorithm>
#include <sstream>

namespace fsdp {

std::vector<int> DesyncBoard::peers(size_t from, size_t count) const {
  const size_t own =
      static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), rank_) - ranks_.begin());
  const size_t others = ranks_.size() - 1;
  std::vector<int> peers;
  for (size_t i = 0; i < std::min(count, others); ++i)
    peers.push_back(ranks_[(own + 1 + (from + i) % others) % ranks_.size()]);
  return peers;
}

void DesyncBoard::post_hashes(Track track, uint64_t number, std::span<const uint64_t> hashes) {
  std::string note = std::to_string(number);
  for (const uint64_t hash : hashes) note += " " + std::to_string(hash);
  board_->post(track_key(track, rank_), note);
}

DesyncBoard::Answer DesyncBoard::compare(Track track, int peer, uint64_t number, uint64_t hash) {
  const auto note = board_->read(track_key(track, peer));
  if (!note) return Answer::kNotYet;
  std::istringstream in(*note);
  uint64_t newest = 0, theirs = 0;
  in >> newest;
  if (newest < number) return Answer::kNotYet;
  for (uint64_t i = newest + 1; i-- > number;) in >> theirs;
  if (!in) return Answer::kNoMore;
  return theirs == hash ? Answer::kSame : Answer::kOther;
}

void DesyncBoard::post(const RankReport& report) {
  board_->post(key("report", rank_), report.encode());
}

std::optional<RankReport> DesyncBoard::report_of(int rank) {
  const auto note = board_->read(key("report", rank));
  return note ? RankReport::decode(*note) : std::nullopt;
}

std::vector<RankReport> DesyncBoard::reports(const RankReport& own) {
  std::vector<RankReport> reports;
  for (const int rank : ranks_) {
    auto report = rank == rank_ ? std::optional(own) : report_of(rank);
    if (report) reports.push_back(std::move(*report));
  }
  return reports;
}

bool DesyncBoard::claim_beginnings() {
  const auto mine = std::to_string(rank_);
  return board_->post_first(key("beginnings"), mine) == mine;
}

bool DesyncBoard::claim_late(uint64_t index) {
  const auto mine = std::to_string(rank_);
  return board_->post_first(key("late", static_cast<int64_t>(index)), mine) == mine;
}

}  // namespace fsdp
