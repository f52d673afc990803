#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/watch/rank_watch.hpp"
#include "trace/collective_log.hpp"
#include "trace/desync/alarm_poll.hpp"
#include "trace/desync/beginnings_check.hpp"
#include "trace/desync/desync_board.hpp"
#include "trace/desync/desync_inquiry.hpp"
#include "trace/desync/verdict/desync_verdict.hpp"
#include "trace/desync/entry_check.hpp"
#include "trace/desync/host_activity.hpp"
#include "trace/desync/late_check.hpp"
#include "trace/desync/steps_check.hpp"
#include "trace/desync/watch_mailbox.hpp"
#include "trace/desync/watch_times.hpp"

namespace fsdp {

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
class DesyncWatcher final : public WatchedHost {
 public:
  DesyncWatcher(std::shared_ptr<const CollectiveLog> log, DesyncBoard board, WatchTimes times);
  DesyncWatcher(const DesyncWatcher&) = delete;
  DesyncWatcher& operator=(const DesyncWatcher&) = delete;

  // --- the thread that trains
  /// Throws ScheduleError if there is a verdict; on rank 0, once the others know it too or some seconds have passed.
  void check() {
    if (verdict_.is_given()) [[unlikely]]
      throw_verdict();
  }
  /// Adds a communicator that is to be failed with the verdict.
  void add(Communicator& group) { verdict_.add(group); }
  /// The host is about to launch, or to wait for, a collective of the group; and it is not any more.
  void enter(Operation operation, int group) { activity_.enter(operation, group); }
  void leave() { activity_.leave(); }
  void set_in_step(bool value) { activity_.set_in_step(value); }
  /// Lets the other thread compare the step that has ended there, which had a sequence of collectives of its own.
  void compare_step(CollectiveLog::Position end) { mailbox_.post_step(end); }
  /// Lets the other thread compare what this rank began with, which is the others' business too. To be called once.
  void compare_beginnings(std::vector<Beginning> beginnings) { mailbox_.post_beginnings(std::move(beginnings)); }
  /// Waits until all ranks have come to the last entry before `position`, and throws CommError if it is not theirs.
  void compare_last_entry(CollectiveLog::Position position) {
    entries_.compare(position);
    check();
  }
  /// A collective has failed with this error: throws ScheduleError if the ranks disagree. Else returns what is known
  /// about the ranks, if the collective was late, or about this one, if the board cannot be reached; "" if neither.
  /// Waits for some seconds at most, whatever becomes of the board.
  std::string explain_failure(std::string_view failure);

  // --- any thread (WatchedHost)
  std::string waits_for() const override { return activity_.waits_for(); }
  std::string whereabouts() const override { return activity_.whereabouts(); }
  bool uses(const GroupPlace& group) const override { return verdict_.uses(group); }
  void explain(std::string_view failure) override { (void)explain_failure(failure); }
  void refuse(const std::string& why) noexcept override;

  // --- the thread that watches
  void run();
  /// Makes `run` return, after it has told the others that this rank's root is gone. True if it did
  /// within that time.
  bool end(std::chrono::milliseconds patience) { return mailbox_.end(patience); }

 private:
  std::chrono::milliseconds look();
  std::chrono::milliseconds compare_steps();
  std::chrono::milliseconds look_at_beginnings();
  std::chrono::milliseconds usual_pause() const {
    return std::max(std::chrono::milliseconds(1), times_.compare_after / 2);
  }
  void say_goodbye();
  std::string last_words(std::string_view why);
  [[noreturn]] void throw_verdict();

  const WatchTimes times_;
  DesyncBoard board_;
  HostActivity activity_;  // written by the thread that trains
  WatchMailbox mailbox_;   // from that thread to the other
  DesyncVerdict verdict_;
  DesyncInquiry inquiry_;

  // The training thread's own.
  EntryCheck entries_;
  bool others_were_awaited_ = false;

  // The watching thread's own.
  StepsCheck steps_;
  BeginningsCheck beginnings_;
  LateCheck late_;
  AlarmPoll alarms_;
};

}  // namespace fsdp
