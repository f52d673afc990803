#include "trace/desync/entry_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void EntryCheck::compare(CollectiveLog::Position position) {
  const uint64_t hashes[] = {position.hash, std::exchange(last_hash_, position.hash)};
  board_.post_hashes(DesyncBoard::Track::kCollectives, position.count, hashes);
  const auto deadline = Clock::now() + timeout_;
  for (const int peer : board_.peers(0, board_.ranks().size())) compare_with(peer, position, deadline);
}

void EntryCheck::compare_with(int peer, CollectiveLog::Position position, Clock::time_point deadline) {
  using Answer = DesyncBoard::Answer;
  auto pause = std::chrono::microseconds(20);
  for (;;) {
    const auto answer = board_.compare(DesyncBoard::Track::kCollectives, peer, position.count, position.hash);
    if (verdict_.is_given()) return;
    if (answer == Answer::kSame || answer == Answer::kNoMore) return;
    if (answer == Answer::kOther)
      throw CommError(fmt::format("rank {} disagrees about collective {}", peer, position.count - 1));
    if (Clock::now() >= deadline)
      throw CommError(fmt::format(
          "rank {} has not come to collective {} within {} ms; TORCH_DISTRIBUTED_DEBUG=DETAIL must be "
          "set on all ranks or none",
          peer, position.count - 1, timeout_.count()));
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(5000));
  }
}

}  // namespace fsdp
