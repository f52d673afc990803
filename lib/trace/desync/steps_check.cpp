#include "trace/desync/steps_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fsdp {

namespace {

constexpr size_t kHashesKept = 4;

}  // namespace

void StepsCheck::begin(std::span<const CollectiveLog::Position> steps, RankReport own) {
  const auto now = Clock::now();
  number_ += steps.size();
  count_ = steps.back().count;
  for (const auto& step : steps) hashes_.insert(hashes_.begin(), step.hash);
  if (hashes_.size() > kHashesKept) hashes_.resize(kHashesKept);
  own_ = std::move(own);
  stage_ = Stage::kNew;
  ask_at_ = now + ask_after_;
  until_ = now + patience_;
  pause_ = std::chrono::milliseconds(10);
}

StepsCheck::StepsLook StepsCheck::look(DesyncBoard& board) {
  const auto now = Clock::now();
  if (stage_ == Stage::kNew) {
    board.post_hashes(DesyncBoard::Track::kSteps, number_, hashes_);
    awaited_ = board.peers(0, DesyncBoard::kPeersAtATime);
    stage_ = Stage::kPosted;
  }
  StepsLook look{.pause = DesyncBoard::kLongestPause};
  if (awaited_.empty()) return look;
  std::erase_if(awaited_, [&](int peer) {
    using Answer = DesyncBoard::Answer;
    const auto answer = board.compare(DesyncBoard::Track::kSteps, peer, number_, hashes_.front());
    is_suspicious_ |= answer == Answer::kOther;
    return answer != Answer::kNotYet;
  });
  if (!awaited_.empty() && now >= ask_at_) look.differs = ask(board);
  // Whoever never comes there is late somewhere, and is found by that.
  if (now >= until_) awaited_.clear();
  pause_ = std::min(pause_ * 2, DesyncBoard::kLongestPause);
  if (!awaited_.empty()) look.pause = pause_;
  return look;
}

/// The step may be new on this rank alone: then the others have nothing to post by themselves.
bool StepsCheck::ask(DesyncBoard& board) {
  if (stage_ != Stage::kAsked) {
    board.post(own_);
    board.raise_alarm(fmt::format("rank {} asks after step {}", board.rank(), number_));
    stage_ = Stage::kAsked;
  }
  bool differs = false;
  std::erase_if(awaited_, [&](int peer) {
    const auto report = board.report_of(peer);
    if (!report || report->count() < count_) return false;
    differs |= find_difference(own_, *report).has_value();
    return true;
  });
  return differs;
}

}  // namespace fsdp
