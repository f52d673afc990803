#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

class GroupPlace;
class NoticeBoard;

/// Somebody who watches over what a part of this rank's program launches: a root's watch.
class WatchedHost {
 public:
  /// Says what the host waits for: "all_gather of blocks.3"; "": it is in no collective. Any thread.
  virtual std::string waits_for() const = 0;
  /// Says where in the program the host is; "": unknown. Any thread.
  virtual std::string whereabouts() const = 0;
  /// True if it launches collectives on that communicator.
  virtual bool uses(const GroupPlace& group) const = 0;
  /// A collective on such a communicator has failed, with this error: throws ScheduleError if the ranks disagree.
  virtual void explain(std::string_view error) = 0;
  /// Makes all ranks of the root throw ScheduleError with this text where they communicate next, as what this rank does cannot
  /// go on.
  virtual void refuse(const std::string& why) noexcept = 0;

 protected:
  ~WatchedHost() = default;
};

/// What one rank waits for, in all of its threads, and how it tells the other ranks when one of them asks. Thread-safe.
class RankWatch {
 public:
  using Clock = std::chrono::steady_clock;
  struct Times {
    std::chrono::milliseconds late_after, alarm_after;
    /// Returns how often a rank looks whether another one asks.
    std::chrono::milliseconds between_looks() const;
  };
  /// A collective that the host waits for outside of any group of parameters.
  struct Awaited {
    std::string text;  ///< "all_reduce of 'clip_grad_norm_'"
  };

  explicit RankWatch(int rank) : rank_(rank) {}

  // --- who waits
  void add(std::weak_ptr<WatchedHost> host, Times times);
  void begin(const Awaited& call);
  void end(const Awaited& call);
  /// Returns the shortest of the hosts' times; else those that follow from the ranks' timeout.
  Times times(std::chrono::milliseconds timeout) const;

  // --- what the others are told
  void add(std::weak_ptr<NoticeBoard> board);
  /// Says all that the rank waits for, or where it is otherwise.
  std::string what_it_does() const;
  /// Says only what it waits for outside of groups.
  std::string awaits() const;
  /// Looks, if it is time, whether another rank has asked since, and says what this one waits for.
  void answer(Clock::time_point now);

  // --- what ends all
  /// Notes that the ranks disagree, and that the groups of some root are failed with this text.
  void note_verdict(const std::string& text);
  /// Returns the verdict that an error repeats.
  std::optional<std::string> verdict_in(std::string_view error) const;
  /// Throws ScheduleError if the ranks disagree, when a collective on that communicator has failed outside of groups.
  void explain(const GroupPlace& group, std::string_view error) const;
  /// Calls WatchedHost::refuse of all hosts that use the communicator.
  void refuse(const GroupPlace& group, const std::string& why) const;

 private:
  struct Host {
    std::weak_ptr<WatchedHost> host;
    Times times;
  };
  struct Board {
    std::weak_ptr<NoticeBoard> board;
    std::string answered;
  };
  std::vector<std::shared_ptr<WatchedHost>> hosts() const;
  void answer(Board& board);

  const int rank_;
  mutable std::mutex mutex_;  // never while a board is asked
  std::vector<Host> hosts_;
  std::vector<const Awaited*> awaited_;
  std::vector<std::string> verdicts_;
  std::mutex boards_mutex_;
  std::vector<Board> boards_;
  Clock::time_point next_ = {};
};

/// The notes that go with it.
namespace awaited_notes {
inline constexpr auto kAlarm = "awaited/alarm";
std::string of_rank(int rank);
}  // namespace awaited_notes

}  // namespace fsdp
