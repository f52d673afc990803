#include "trace/desync/desync_watcher.hpp"

#include <fmt/format.h>

#include <exception>
#include <span>
#include <utility>

#include "base/first_line.hpp"
#include "base/log.hpp"
#include "comm/bounded_calls.hpp"
#include "fsdp/schedule_check_options.hpp"

namespace fsdp {

namespace {

using std::chrono::milliseconds;

/// How long peers have to come to the end of the same step by themselves.
constexpr auto kPatience = milliseconds(100);

}  // namespace

DesyncWatcher::DesyncWatcher(std::shared_ptr<const CollectiveLog> log, DesyncBoard board, WatchTimes times)
    : times_(times),
      board_(std::move(board)),
      activity_(std::move(log), board_.rank(), board_.rank_watch()),
      inquiry_(board_, verdict_, times.settling()),
      entries_(board_, verdict_, times.timeout),
      steps_(std::min(kPatience, times.compare_after), times.late_after),
      beginnings_(times.late_after),
      late_(times, activity_, board_, inquiry_),
      alarms_(times.between_polls(), activity_, board_, inquiry_) {}

// --- the thread that trains

std::string DesyncWatcher::explain_failure(std::string_view failure) {
  activity_.set_failed();
  // Another root of this rank may have failed the communicator.
  if (const auto known = board_.rank_watch()->verdict_in(failure); known && !verdict_.is_given()) throw ScheduleError(*known);
  try {
    if (!verdict_.is_given()) inquiry_.explain_failure(activity_.report());
    if (!verdict_.is_given() && late_.has_warned()) return board_.late().value_or("");
  } catch (const NoAnswer& error) {
    return last_words(error.what());
  } catch (const std::exception& error) {
    // A call for a key may end of the store's own timeout, just before it would have been given up.
    log().debug("the schedule check cannot reach its board: {}", error.what());
    return last_words(fmt::format("the rendezvous store has not answered: {}", first_line(error.what())));
  }
  check();
  return "";
}

void DesyncWatcher::refuse(const std::string& why) noexcept {
  try {
    inquiry_.give_verdict({.text = why});
  } catch (const std::exception& error) {
    log().debug("the schedule check cannot tell the other ranks: {}", error.what());
  }
}

/// What this rank knows by itself.
std::string DesyncWatcher::last_words(std::string_view why) {
  check();
  const auto own = activity_.report();
  return fmt::format("{}, so what the other ranks do is not known:{}", why,
                     describe_ranks(std::span(&own, 1), std::span(&own.rank, 1)));
}

void DesyncWatcher::throw_verdict() {
  if (!std::exchange(others_were_awaited_, true)) try {
      inquiry_.await_others();
    } catch (const std::exception& error) {
      log().debug("the schedule check does not wait for the others, it cannot reach its board: {}", error.what());
    }
  throw ScheduleError(verdict_.get().text, verdict_.get().difference);
}

// --- the thread that watches

void DesyncWatcher::run() {
  auto pause = times_.compare_after / 2;
  bool has_board = true;
  while (has_board && mailbox_.await(pause)) {
    try {
      pause = look();
    } catch (const NoAnswer& error) {
      log().debug("the schedule check goes on later: {}", error.what());
      pause = usual_pause();
    } catch (const std::exception& error) {
      // The store's server is gone, most often because the program is over there.
      log().debug("the schedule check ends, it cannot reach its board: {}", error.what());
      has_board = false;
    }
  }
  if (has_board && !verdict_.is_given()) say_goodbye();
  mailbox_.note_returned();
}

void DesyncWatcher::say_goodbye() {
  try {
    auto report = activity_.report();
    report.state = RankReport::State::kEnded;
    board_.post(report);
  } catch (const std::exception& error) {
    log().debug("the schedule check cannot say that it ends: {}", error.what());
  }
}

/// Returns how long to sleep.
milliseconds DesyncWatcher::look() {
  // First, so that what is new here is taken whatever becomes of the steps: it would keep this thread awake.
  const auto beginnings = look_at_beginnings();
  const auto steps = std::min(compare_steps(), beginnings);
  if (verdict_.is_given()) return usual_pause();
  const auto now = std::chrono::steady_clock::now();
  board_.rank_watch()->answer(now);
  late_.follow(now);
  if (late_.is_suspicious() || steps_.is_suspicious())
    late_.ask();
  else
    alarms_.look(now);
  if (late_.is_late() && !verdict_.is_given()) late_.warn();
  return std::min(usual_pause(), steps);
}

milliseconds DesyncWatcher::compare_steps() {
  const auto fresh = mailbox_.take_steps();
  if (!fresh.empty()) steps_.begin(fresh, activity_.report());
  const auto [pause, differs] = steps_.look(board_);
  if (differs) inquiry_.give_difference(steps_.own());
  return pause;
}

milliseconds DesyncWatcher::look_at_beginnings() {
  auto fresh = mailbox_.take_beginnings();
  if (!fresh.empty()) beginnings_.begin(std::move(fresh));
  const auto [pause, verdict] = beginnings_.look(board_);
  if (verdict) inquiry_.give_verdict({.text = *verdict});
  return pause;
}

}  // namespace fsdp
