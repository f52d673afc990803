#include "trace/desync/late_check.hpp"

#include <fmt/format.h>

#include "base/log.hpp"

namespace fsdp {

namespace {

double seconds(std::chrono::steady_clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

void LateCheck::ask() {
  if (inquiry_.take_over_verdict()) return;
  const auto own = activity_.report();
  if (!standstill_.is_posted()) {
    board_.post(own);
    board_.raise_alarm(fmt::format("rank {} waits at {}, {}", board_.rank(), own.count(), standstill_.number()));
    standstill_.note_posted();
  }
  if (!standstill_.is_look_due()) return;
  const auto peers = board_.peers(next_peer_, DesyncBoard::kPeersAtATime);
  next_peer_ += peers.size();
  for (const int peer : peers) {
    const auto report = board_.report_of(peer);
    if (!report) continue;
    if (find_difference(own, *report)) return inquiry_.give_difference(own);
    // A rank that has ended launches nothing any more.
    const bool is_gone = report->state == RankReport::State::kEnded && report->count() < own.count();
    if (standstill_.is_late() && is_gone) return inquiry_.give_gone(activity_.report());
  }
}

void LateCheck::warn() {
  standstill_.note_reported();
  has_warned_.store(true, std::memory_order_relaxed);
  const auto own = activity_.report();
  if (own.count() == 0 || !board_.claim_late(own.count() - 1)) return;
  const auto reports = board_.reports(own);
  if (find_disagreement(reports)) return inquiry_.give_difference(own);
  const auto text = fmt::format("{} is late: rank {} has waited {:.1f} s for it. What the ranks do:{}", own.waits_for,
                                board_.rank(), seconds(Standstill::Clock::now() - standstill_.since()),
                                describe_ranks(reports, board_.ranks()));
  board_.post_late(text);
  log().warn(text);
}

}  // namespace fsdp
