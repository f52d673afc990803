#include "trace/desync_watcher.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "comm/bounded_calls.hpp"
#include "fsdp/schedule_check.hpp"

namespace fsdp {

namespace {

using std::chrono::milliseconds;

constexpr int kLongestGap = 16;
/// Longer than any answer of a store that is alive.
constexpr auto kFarewell = std::chrono::seconds(5);

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

milliseconds WatchTimes::settling() const {
  return std::min(milliseconds(2000), std::max(milliseconds(100), late_after));
}

// --- the thread that trains

void DesyncWatcher::check() const {
  if (failure_.is_set()) [[unlikely]]
    throw ScheduleError(failure_.reason());
}

void DesyncWatcher::enter(Operation operation, int group) {
  waits_for_.store(static_cast<uint64_t>(operation) << 32 | static_cast<uint32_t>(group),
                   std::memory_order_relaxed);
  activity_.store((activity_.load(std::memory_order_relaxed) + 1) | 1, std::memory_order_release);
}

void DesyncWatcher::leave() {
  const uint64_t activity = activity_.load(std::memory_order_relaxed);
  activity_.store(activity + activity % 2, std::memory_order_release);
}

void DesyncWatcher::compare_step() {
  {
    std::lock_guard lock(mutex_);
    new_steps_.push_back(log_->position());
  }
  wake_.notify_one();
}

void DesyncWatcher::compare_beginnings(std::vector<Beginning> beginnings) {
  {
    std::lock_guard lock(mutex_);
    new_beginnings_ = std::move(beginnings);
  }
  wake_.notify_one();
}

void DesyncWatcher::compare_last_entry() {
  const auto position = log_->position();
  const uint64_t hashes[] = {position.hash, std::exchange(last_hash_, position.hash)};
  board_.post_hashes(DesyncBoard::Track::kCollectives, position.count, hashes);
  const auto deadline = Clock::now() + times_.timeout;
  for (const int peer : board_.peers(0, board_.ranks().size())) {
    auto pause = std::chrono::microseconds(20);
    for (;;) {
      using Answer = DesyncBoard::Answer;
      const auto answer = board_.compare(DesyncBoard::Track::kCollectives, peer, position.count, position.hash);
      check();
      if (answer == Answer::kSame || answer == Answer::kNoMore) break;
      if (answer == Answer::kOther)
        throw CommError(fmt::format("rank {} disagrees about collective {}", peer, position.count - 1));
      if (Clock::now() >= deadline)
        throw CommError(fmt::format(
            "rank {} has not come to collective {} within {} ms; TORCH_DISTRIBUTED_DEBUG=DETAIL must be "
            "set on all ranks or none",
            peer, position.count - 1, times_.timeout.count()));
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(5000));
    }
  }
}

/// What this rank knows by itself.
std::string DesyncWatcher::last_words(std::string_view why) {
  check();
  const auto own = own_report();
  return fmt::format("{}, so of the others nothing is known here:{}", why,
                     describe_ranks(std::span(&own, 1), std::span(&own.rank, 1)));
}

std::string DesyncWatcher::explain_failure() {
  has_failed_.store(true, std::memory_order_relaxed);
  try {
    if (!failure_.is_set()) settle();
    if (!failure_.is_set() && is_late_.load(std::memory_order_relaxed)) return board_.late().value_or("");
  } catch (const NoAnswer& error) {
    return last_words(error.what());
  } catch (const std::exception& error) {
    // A call for a key may end of the store's own timeout, just before it would have been given up.
    const std::string_view what(error.what());
    log().debug("the schedule check cannot reach its board: {}", what);
    return last_words(fmt::format("the rendezvous store has not answered: {}", what.substr(0, what.find('\n'))));
  }
  check();
  return "";
}

void DesyncWatcher::add(Communicator& group) {
  for (const auto& known : groups_)
    if (known.identity == &group && !known.alive.expired()) return;
  std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const Group& known) { return known.alive.expired(); });
  groups_.push_back({&group, group.weak_from_this()});
}

// --- both

RankReport DesyncWatcher::own_report() const {
  RankReport report{.rank = board_.rank(), .window = log_->window()};
  if (has_failed_.load(std::memory_order_relaxed)) {
    report.state = RankReport::State::kFailed;
  } else if (activity_.load(std::memory_order_acquire) % 2 == 1) {
    const uint64_t waits_for = waits_for_.load(std::memory_order_relaxed);
    report.state = RankReport::State::kInCollective;
    report.waits_for = fmt::format("{} of {}", names_of(static_cast<Operation>(waits_for >> 32)).plain,
                                   log_->name_of_group(static_cast<int>(waits_for & 0xFFFFFFFF)));
  }
  return report;
}

void DesyncWatcher::give_verdict(const std::string& text) {
  const auto verdict = board_.give_verdict(text);
  failure_.set(verdict);
  std::vector<std::shared_ptr<Communicator>> groups;
  {
    std::lock_guard lock(mutex_);
    for (const auto& known : groups_) groups.push_back(known.alive.lock());
  }
  for (const auto& group : groups)
    if (group) group->abort(verdict);
  // Ranks that do not wait for anything look at alarms only.
  board_.raise_alarm(fmt::format("verdict of rank {}", board_.rank()));
}

/// True if waiting for a newer report could not change what this one says about the first `count`
/// entries.
bool DesyncWatcher::is_conclusive(const std::optional<RankReport>& report, uint64_t count) const {
  using State = RankReport::State;
  return report && (report->count() >= count || report->state == State::kEnded ||
                    report->state == State::kFailed);
}

void DesyncWatcher::publish_difference(const RankReport& own) {
  // The message is better for what every rank has to say, so those who are late get a moment.
  const auto deadline = Clock::now() + times_.settling();
  for (;;) {
    const auto reports = board_.reports(own);
    const auto found = find_disagreement(reports);
    if (!found) return;
    const bool all_spoke =
        reports.size() == board_.ranks().size() &&
        std::all_of(reports.begin(), reports.end(),
                    [&](const auto& report) { return is_conclusive(report, found->index + 1); });
    if (all_spoke || Clock::now() >= deadline) return give_verdict(found->text);
    if (const auto verdict = board_.verdict()) return give_verdict(*verdict);
    std::this_thread::sleep_for(milliseconds(5));
  }
}

void DesyncWatcher::settle() {
  const auto deadline = Clock::now() + times_.settling();
  const auto own = own_report();
  board_.post(own);
  board_.raise_alarm(fmt::format("rank {} failed at {}", board_.rank(), own.count()));
  const auto peers = board_.peers(0, 4 * DesyncBoard::kPeersAtATime);
  while (Clock::now() < deadline && !failure_.is_set()) {
    if (const auto verdict = board_.verdict()) return give_verdict(*verdict);
    bool all_spoke = true;
    for (const int peer : peers) {
      const auto report = board_.report_of(peer);
      if (report && find_difference(own, *report)) return publish_difference(own);
      all_spoke &= is_conclusive(report, own.count());
    }
    if (all_spoke) return;
    std::this_thread::sleep_for(milliseconds(5));
  }
}

// --- the thread that watches

void DesyncWatcher::run() {
  std::unique_lock lock(mutex_);
  auto pause = times_.compare_after / 2;
  bool has_board = true;
  while (!is_ending_ && has_board) {
    wake_.wait_for(lock, pause, [&] { return is_ending_ || !new_steps_.empty() || !new_beginnings_.empty(); });
    if (is_ending_) break;
    lock.unlock();
    try {
      pause = look();
    } catch (const NoAnswer& error) {
      log().debug("the schedule check goes on later: {}", error.what());
      pause = std::max(milliseconds(1), times_.compare_after / 2);
    } catch (const std::exception& error) {
      // The store's server is gone, most often because the program is over there.
      log().debug("the schedule check ends, it cannot reach its board: {}", error.what());
      has_board = false;
    }
    lock.lock();
  }
  lock.unlock();
  try {
    if (has_board && !failure_.is_set()) {
      auto report = own_report();
      report.state = RankReport::State::kEnded;
      board_.post(report);
    }
  } catch (const std::exception& error) {
    log().debug("the schedule check cannot say that it ends: {}", error.what());
  }
  lock.lock();
  has_ended_ = true;
  gone_.notify_all();
}

bool DesyncWatcher::end() {
  std::unique_lock lock(mutex_);
  is_ending_ = true;
  wake_.notify_one();
  return gone_.wait_for(lock, kFarewell, [this] { return has_ended_; });
}

/// Returns how long to sleep.
milliseconds DesyncWatcher::look() {
  const auto usual = std::max(milliseconds(1), times_.compare_after / 2);
  // First, so that what is new here is taken whatever becomes of the steps: it would keep this thread awake.
  const auto beginnings = look_at_beginnings();
  const auto steps = std::min(compare_steps(), beginnings);
  if (failure_.is_set()) return usual;
  const auto now = Clock::now();
  const uint64_t activity = activity_.load(std::memory_order_acquire);
  if (activity != seen_.activity) seen_ = {.activity = activity, .since = now};
  const bool is_waiting = activity % 2 == 1;
  const auto still = now - seen_.since;
  // A host that waits elsewhere (for a GPU, say) stands still in the middle of a step.
  const bool is_stuck = is_waiting ? still >= times_.compare_after
                                   : in_step_.load(std::memory_order_relaxed) && still >= times_.late_after;
  const bool is_late = is_waiting && still >= times_.late_after;
  if (is_stuck || steps_.is_suspicious())
    examine(is_late);
  else if (now >= next_poll_)
    answer_alarm();
  if (is_late && !seen_.is_reported && !failure_.is_set()) report_late();
  return std::min(usual, steps);
}

void DesyncWatcher::examine(bool is_late) {
  if (const auto verdict = board_.verdict()) return give_verdict(*verdict);
  const auto own = own_report();
  if (!seen_.is_posted) {
    board_.post(own);
    board_.raise_alarm(fmt::format("rank {} waits at {}, {}", board_.rank(), own.count(), seen_.activity));
    seen_.is_posted = true;
  }
  // More and more seldom: who comes later finds this rank's report at its own first look.
  if (++seen_.looks < seen_.next_look) return;
  seen_.next_look += std::min(seen_.looks, kLongestGap);
  const auto peers = board_.peers(next_peer_, DesyncBoard::kPeersAtATime);
  next_peer_ += peers.size();
  for (const int peer : peers) {
    const auto report = board_.report_of(peer);
    if (!report) continue;
    if (find_difference(own, *report)) return publish_difference(own);
    if (is_late && report->state == RankReport::State::kEnded && report->count() < own.count())
      return report_gone();
  }
}

void DesyncWatcher::answer_alarm() {
  next_poll_ = Clock::now() + times_.between_polls();
  auto alarm = board_.alarm();
  if (!alarm || *alarm == seen_alarm_) return;
  if (const auto verdict = board_.verdict()) return give_verdict(*verdict);
  board_.post(own_report());
  seen_alarm_ = std::move(*alarm);
}

void DesyncWatcher::report_late() {
  seen_.is_reported = true;
  is_late_.store(true, std::memory_order_relaxed);
  const auto own = own_report();
  if (own.count() == 0 || !board_.claim_late(own.count() - 1)) return;
  const auto reports = board_.reports(own);
  if (find_disagreement(reports)) return publish_difference(own);
  const auto text = fmt::format("{} is late: rank {} has waited {:.1f} s for it. What the ranks do:{}",
                                own.waits_for, board_.rank(), seconds(Clock::now() - seen_.since),
                                describe_ranks(reports, board_.ranks()));
  board_.post_late(text);
  log().warn(text);
}

/// A rank that has ended launches nothing any more: what this one waits for is in vain.
void DesyncWatcher::report_gone() {
  const auto own = own_report();
  const auto reports = board_.reports(own);
  std::vector<int> gone;
  for (const auto& report : reports)
    if (report.state == RankReport::State::kEnded && report.count() < own.count())
      gone.push_back(report.rank);
  give_verdict(fmt::format("{} {} ended before the others; {} cannot complete:{}", list_ranks(gone),
                           gone.size() == 1 ? "has" : "have", own.waits_for,
                           describe_ranks(reports, board_.ranks())));
}

milliseconds DesyncWatcher::compare_steps() {
  std::vector<CollectiveLog::Position> fresh;
  {
    std::lock_guard lock(mutex_);
    fresh.swap(new_steps_);
  }
  if (!fresh.empty()) steps_.begin(fresh, own_report());
  const auto [pause, differs] = steps_.look(board_);
  if (differs) publish_difference(steps_.own());
  return pause;
}

milliseconds DesyncWatcher::look_at_beginnings() {
  std::vector<Beginning> fresh;
  {
    std::lock_guard lock(mutex_);
    fresh.swap(new_beginnings_);
  }
  if (!fresh.empty()) beginnings_.begin(std::move(fresh));
  const auto [pause, verdict] = beginnings_.look(board_);
  if (verdict) give_verdict(*verdict);
  return pause;
}

}  // namespace fsdp
