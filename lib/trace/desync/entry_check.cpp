#include "trace/desync/entry_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "base/first_line.hpp"
#include "comm/bounded_calls.hpp"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kBetweenTries = std::chrono::milliseconds(10);

/// What the board answers. One that does not is asked again until the deadline, as the collective itself would wait so long
/// for a peer that is cut off. Throws NoAnswer alone.
template <class Ask>
auto patiently(Clock::time_point deadline, const DesyncVerdict& verdict, const Ask& ask) {
  for (;;) {
    try {
      return ask();
    } catch (const NoAnswer&) {
      if (verdict.is_given() || Clock::now() >= deadline) throw;
    } catch (const std::exception& error) {  // the store's own: what serves it has gone
      throw NoAnswer(first_line(error.what()));
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
}

}  // namespace

void EntryCheck::compare(CollectiveLog::Position position) {
  const uint64_t hashes[] = {position.hash, std::exchange(last_hash_, position.hash)};
  const auto deadline = Clock::now() + timeout_;
  const auto peers = board_.peers(0, board_.ranks().size());
  try {
    patiently(deadline, verdict_,
              [&] { board_.post_hashes(DesyncBoard::Track::kCollectives, position.count, hashes); });
    for (const int peer : peers) compare_with(peer, position, deadline);
  } catch (const NoAnswer& error) {
    if (verdict_.is_given()) return;
    throw CommError(fmt::format("it is not known whether {} came to collective {}: {}", list_ranks(peers),
                                position.count - 1, error.what()));
  }
}

void EntryCheck::compare_with(int peer, CollectiveLog::Position position, Clock::time_point deadline) {
  using Answer = DesyncBoard::Answer;
  auto pause = std::chrono::microseconds(20);
  for (;;) {
    const auto answer = patiently(deadline, verdict_, [&] {
      return board_.compare(DesyncBoard::Track::kCollectives, peer, position.count, position.hash);
    });
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
