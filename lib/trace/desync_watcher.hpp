#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/failure_flag.hpp"
#include "trace/beginnings_check.hpp"
#include "trace/collective_log.hpp"
#include "trace/desync_board.hpp"
#include "trace/steps_check.hpp"

namespace fsdp {

struct WatchTimes {
  std::chrono::milliseconds late_after;
  std::chrono::milliseconds compare_after;
  std::chrono::milliseconds timeout;

  /// A rank that has nothing to ask looks so often whether another one does.
  std::chrono::milliseconds between_polls() const { return std::min(late_after / 6, compare_after); }
  /// How long a rank whose collective failed waits for the others to say what they did.
  std::chrono::milliseconds settling() const;
};

/// Compares this rank's schedule with the other ranks', and says so when a collective is late.
///
/// Two threads share it: the one that trains tells what it does, in a few atomic stores; a thread
/// that does nothing else (`run`) looks after it. It uses the board only
/// - at the end of a step with a new sequence of collectives: one note, compared with some peers', who
///   are asked for their reports if they have no such note;
/// - at the end of the first step: one note of what this rank began with, compared with two others';
/// - while the host has waited for a collective for `compare_after`: the report, and the peers';
/// - every second or so, one note: whether another rank has raised the alarm.
/// A disagreement is a verdict: it is posted once, every rank takes it over, fails its communicators
/// with it (which wakes whoever waits in them), and throws it.
class DesyncWatcher {
 public:
  DesyncWatcher(std::shared_ptr<CollectiveLog> log, DesyncBoard board, WatchTimes times)
      : log_(std::move(log)), board_(std::move(board)), times_(times),
        steps_(std::min(kPatience, times.compare_after), times.late_after), beginnings_(times.late_after) {}

  // --- the thread that trains
  /// Throws ScheduleError if there is a verdict.
  void check() const;
  /// The host is about to launch, or to wait for, a collective of the group; and it is not any more.
  void enter(Operation operation, int group);
  void leave();
  void set_in_step(bool value) { in_step_.store(value, std::memory_order_relaxed); }
  /// The step that has ended had a sequence of collectives of its own.
  void compare_step();
  /// What this rank began with, which is the others' business too. Once.
  void compare_beginnings(std::vector<Beginning> beginnings);
  /// Waits until all ranks have come to the last entry, and throws ScheduleError if it is not theirs.
  void compare_last_entry();
  /// A collective has failed: throws ScheduleError if the ranks disagree. Else returns what is known
  /// about the ranks, if the collective was late, or about this one, if the board cannot be reached; "" if neither.
  /// Waits for some seconds at most, whatever becomes of the board.
  std::string explain_failure();
  /// To be failed with the verdict.
  void add(Communicator& group);

  // --- the thread that watches
  void run();
  /// Makes `run` return, after it has told the others that this rank's root is gone. True if it did
  /// within some seconds.
  bool end();

 private:
  using Clock = std::chrono::steady_clock;
  /// How long peers have to come to the end of the same step by themselves.
  static constexpr std::chrono::milliseconds kPatience{100};

  std::chrono::milliseconds look();
  void examine(bool is_late);
  void answer_alarm();
  void report_late();
  void report_gone();
  std::chrono::milliseconds compare_steps();
  std::chrono::milliseconds look_at_beginnings();
  void settle();
  void publish_difference(const RankReport& own);
  void give_verdict(const std::string& text);
  RankReport own_report() const;
  std::string last_words(std::string_view why);
  bool is_conclusive(const std::optional<RankReport>& report, uint64_t count) const;

  const std::shared_ptr<CollectiveLog> log_;
  DesyncBoard board_;
  const WatchTimes times_;
  FailureFlag failure_;

  // Written by the thread that trains.
  std::atomic<uint64_t> activity_{0};  ///< odd: in a collective
  std::atomic<uint64_t> waits_for_{0};
  std::atomic<bool> in_step_{false}, has_failed_{false}, is_late_{false};
  uint64_t last_hash_ = 0;

  // The watching thread's own.
  struct {
    uint64_t activity = 0;
    Clock::time_point since = Clock::now();
    bool is_posted = false, is_reported = false;
    int looks = 0, next_look = 1;
  } seen_;
  StepsCheck steps_;
  BeginningsCheck beginnings_;
  size_t next_peer_ = 0;
  Clock::time_point next_poll_ = Clock::now();
  std::string seen_alarm_;

  std::mutex mutex_;  // of what follows
  std::condition_variable wake_, gone_;
  bool is_ending_ = false, has_ended_ = false;
  std::vector<CollectiveLog::Position> new_steps_;
  std::vector<Beginning> new_beginnings_;
  struct Group {
    const Communicator* identity;  // only compared
    std::weak_ptr<Communicator> alive;
  };
  std::vector<Group> groups_;  // written by the thread that trains
};

}  // namespace fsdp
