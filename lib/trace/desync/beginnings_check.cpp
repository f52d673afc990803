#include "trace/desync/beginnings_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace fsdp {

namespace {

constexpr auto kWayOut =
    "call manual_seed with the same seed on all ranks before the model is made, load the same values, or shard it with "
    "sync_from_rank0";

}  // namespace

void BeginningsCheck::begin(std::vector<Beginning> own) {
  own_ = std::move(own);
  is_posted_ = false;
  for (const auto& beginning : own_)
    for (const int peer : {beginning.next_beside, beginning.next_replica})
      if (peer >= 0 && std::find(awaited_.begin(), awaited_.end(), peer) == awaited_.end()) awaited_.push_back(peer);
  until_ = Clock::now() + patience_;
}

BeginningsCheck::BeginningsLook BeginningsCheck::look(DesyncBoard& board) {
  const auto now = Clock::now();
  if (!is_posted_) {
    board.post_beginnings(encode(own_));
    is_posted_ = true;
  }
  BeginningsLook look{.pause = DesyncBoard::kLongestPause};
  if (awaited_.empty()) return look;
  for (auto next = awaited_.begin(); next != awaited_.end();) {
    const int peer = *next;
    const auto note = board.beginnings_of(peer);
    if (!note) {
      ++next;
      continue;
    }
    next = awaited_.erase(next);
    // At once: a later call of the board may fail.
    if (auto verdict = compare(board, peer, *note)) return {.pause = pause_, .verdict = std::move(verdict)};
  }
  // Whoever never gets to the end of its first step is late, and is found by that.
  if (now >= until_) awaited_.clear();
  pause_ = std::min(pause_ * 2, DesyncBoard::kLongestPause);
  if (awaited_.empty())
    own_.clear();
  else
    look.pause = pause_;
  return look;
}

std::optional<std::string> BeginningsCheck::compare(DesyncBoard& board, int peer, const std::string& note) {
  for (const auto& own : own_) {
    if (own.next_beside != peer && own.next_replica != peer) continue;
    const auto param = find_other_values(own, note);
    if (!param) continue;
    const auto ranks = list_ranks({board.rank(), peer});
    if (own.next_replica == peer)
      return fmt::format("the replicas of '{}' on {} began with different values, and no collective makes them equal; {}",
                         *param, ranks, kWayOut);
    if (std::exchange(is_told_, true)) continue;
    if (board.claim_beginnings())
      log().warn("{} began with different values of '{}', and perhaps of others; the sharded model is a mixture of them. If "
                 "that is not meant, {}",
                 ranks, *param, kWayOut);
  }
  return std::nullopt;
}

}  // namespace fsdp
