#include "trace/desync/desync_inquiry.hpp"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <vector>

#include "comm/watch/rank_watch.hpp"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kBetweenLooks = milliseconds(5);

/// True if waiting for a newer report could not change what this one says about the first `count` entries, or the way to them.
bool is_conclusive(const std::optional<RankReport>& report, uint64_t count) {
  using State = RankReport::State;
  if (!report) return false;
  const uint64_t told = report->count() + (report->window.between.count > 0 ? 1 : 0);
  return told >= count || report->state == State::kEnded || report->state == State::kFailed;
}

}  // namespace

bool DesyncInquiry::take_over_verdict() {
  const auto verdict = board_.verdict().read();
  if (verdict) give_verdict(*verdict);
  return verdict.has_value();
}

void DesyncInquiry::give_verdict(const Verdict& found) {
  const auto verdict = board_.verdict().give(found);
  // The last, as it wakes the host, which may end the program; but whatever becomes of the board.
  const auto give = c10::make_scope_exit([&] {
    board_.rank_watch()->note_verdict(verdict.text);
    verdict_.give(verdict);
  });
  board_.verdict().note_known();
  // Ranks that do not wait for anything look at alarms only.
  board_.raise_alarm(fmt::format("verdict of rank {}", board_.rank()));
}

void DesyncInquiry::await_others() {
  if (board_.rank() != 0) return;
  const auto deadline = Clock::now() + settling_;
  auto waits_for = board_.peers(0, board_.ranks().size());
  for (;;) {
    std::erase_if(waits_for, [&](int peer) {
      if (board_.verdict().is_known_to(peer)) return true;
      const auto report = board_.report_of(peer);
      return report && report->state == RankReport::State::kEnded;
    });
    if (waits_for.empty() || Clock::now() >= deadline) return;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void DesyncInquiry::give_difference(const RankReport& own) {
  // The message is better for what every rank has to say, so those who are late get a moment.
  const auto deadline = Clock::now() + settling_;
  for (;;) {
    const auto reports = board_.reports(own);
    const auto found = find_disagreement(reports);
    if (!found) return;
    const auto collective = static_cast<uint64_t>(found->difference.collective.value());
    const bool all_spoke =
        reports.size() == board_.ranks().size() &&
        std::all_of(reports.begin(), reports.end(),
                    [&](const auto& report) { return is_conclusive(report, collective + 1); });
    if (all_spoke || Clock::now() >= deadline) return give_verdict(*found);
    if (take_over_verdict()) return;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void DesyncInquiry::explain_failure(const RankReport& own) {
  const auto deadline = Clock::now() + settling_;
  board_.post(own);
  board_.raise_alarm(fmt::format("rank {} failed at {}", board_.rank(), own.count()));
  const auto peers = board_.peers(0, 4 * DesyncBoard::kPeersAtATime);
  while (Clock::now() < deadline && !verdict_.is_given()) {
    if (take_over_verdict()) return;
    bool all_spoke = true;
    for (const int peer : peers) {
      const auto report = board_.report_of(peer);
      if (report && find_difference(own, *report)) return give_difference(own);
      all_spoke &= is_conclusive(report, own.count());
    }
    if (all_spoke) return;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void DesyncInquiry::give_gone(const RankReport& own) {
  const auto reports = board_.reports(own);
  std::vector<int> gone;
  uint64_t first_missing = own.count();
  for (const auto& report : reports)
    if (report.state == RankReport::State::kEnded && report.count() < own.count()) {
      gone.push_back(report.rank);
      first_missing = std::min(first_missing, report.count());
    }
  give_verdict({fmt::format("{} {} ended before the others; {} cannot complete:{}", list_ranks(gone),
                            gone.size() == 1 ? "has" : "have", own.waits_for, describe_ranks(reports, board_.ranks())),
                difference_at(reports, first_missing)});
}

}  // namespace fsdp
