#include "comm/watch/rank_watch.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.hpp"
#include "comm/notice_board.hpp"
#include "comm/watch/group_place.hpp"
#include "fsdp/schedule_check_options.hpp"

namespace fsdp {

using std::chrono::milliseconds;

std::string awaited_notes::of_rank(int rank) { return fmt::format("awaited/{}", rank); }

milliseconds RankWatch::Times::between_looks() const { return std::min(late_after / 6, alarm_after); }

void RankWatch::add(std::weak_ptr<WatchedHost> host, Times times) {
  std::lock_guard lock(mutex_);
  std::erase_if(hosts_, [](const Host& known) { return known.host.expired(); });
  hosts_.push_back({std::move(host), times});
}

void RankWatch::begin(const Awaited& call) {
  std::lock_guard lock(mutex_);
  awaited_.push_back(&call);
}

void RankWatch::end(const Awaited& call) {
  std::lock_guard lock(mutex_);
  std::erase(awaited_, &call);
}

RankWatch::Times RankWatch::times(milliseconds timeout) const {
  Times times{.late_after = std::min(milliseconds(30'000), timeout / 2), .alarm_after = milliseconds(1000)};
  std::lock_guard lock(mutex_);
  for (const auto& [host, of_host] : hosts_)
    if (!host.expired()) times.late_after = std::min(times.late_after, of_host.late_after);
  times.alarm_after = std::min(times.alarm_after, times.late_after / 4);
  return times;
}

void RankWatch::add(std::weak_ptr<NoticeBoard> board) {
  std::lock_guard lock(boards_mutex_);
  std::erase_if(boards_, [](const Board& known) { return known.board.expired(); });
  boards_.push_back({std::move(board), {}});
}

std::vector<std::shared_ptr<WatchedHost>> RankWatch::hosts() const {
  std::vector<std::shared_ptr<WatchedHost>> alive;
  std::lock_guard lock(mutex_);
  for (const auto& known : hosts_)
    if (auto host = known.host.lock()) alive.push_back(std::move(host));
  return alive;
}

std::string RankWatch::awaits() const {
  std::vector<std::string> all;
  std::lock_guard lock(mutex_);
  for (const auto* call : awaited_) all.push_back(call->text);
  return fmt::format("{}", fmt::join(all, ", and for "));
}

std::string RankWatch::what_it_does() const {
  std::vector<std::string> all;
  if (auto text = awaits(); !text.empty()) all.push_back(std::move(text));
  const auto known = hosts();
  for (const auto& host : known)
    if (auto text = host->waits_for(); !text.empty()) all.push_back(std::move(text));
  if (!all.empty()) return fmt::format("waits for {}", fmt::join(all, ", and for "));
  const auto where = known.empty() ? "" : known.front()->whereabouts();
  return where.empty() ? "in no collective" : "in no collective, " + where;
}

void RankWatch::answer(Clock::time_point now) {
  // Whoever comes meanwhile need not wait: this one answers.
  std::unique_lock lock(boards_mutex_, std::try_to_lock);
  if (!lock || now < next_) return;
  next_ = now + times(milliseconds(60'000)).between_looks();
  for (auto& board : boards_) answer(board);
}

void RankWatch::answer(Board& known) {
  const auto board = known.board.lock();
  if (!board) return;
  try {
    auto alarm = board->read(awaited_notes::kAlarm);
    if (!alarm || *alarm == known.answered) return;
    board->post(awaited_notes::of_rank(rank_), fmt::format("{}\n{}", *alarm, what_it_does()));
    known.answered = std::move(*alarm);
  } catch (const std::exception& error) {
    // One of several boards: who answers goes on.
    log().debug("the watch cannot reach a board: {}", error.what());
  }
}

void RankWatch::note_verdict(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (std::find(verdicts_.begin(), verdicts_.end(), text) == verdicts_.end()) verdicts_.push_back(text);
}

std::optional<std::string> RankWatch::verdict_in(std::string_view error) const {
  std::lock_guard lock(mutex_);
  for (const auto& verdict : verdicts_)
    if (error.find(verdict) != std::string_view::npos) return verdict;
  return std::nullopt;
}

void RankWatch::explain(const GroupPlace& group, std::string_view error) const {
  for (const auto& host : hosts())
    if (host->uses(group)) host->explain(error);
  if (const auto verdict = verdict_in(error)) throw ScheduleError(*verdict);
}

void RankWatch::refuse(const GroupPlace& group, const std::string& why) const {
  for (const auto& host : hosts())
    if (host->uses(group)) host->refuse(why);
}

}  // namespace fsdp
