#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/timeline_events.hpp"

namespace fsdp {

/// Writes down what one root does, as this rank's host sees it, while a user wants a timeline.
///
/// Slices on the host's track are opened and closed like brackets: a phase of the step, within it the
/// use of a group, within that what the runtime does. Collectives overlap and have tracks of their own.
/// Not thread-safe: the root's lock guards it.
class TimelineRecorder {
 public:
  TimelineRecorder(int rank, size_t max_events);

  /// Begins a phase: "forward", "backward" or "between steps". The phase under way, and what is open in it, ends here.
  void begin_phase(const char* name);
  /// Operators use the group from here on, until the next call or the end of the phase.
  void begin_use(const std::string& group);
  void end_use();

  void begin_slice(std::string name);
  void end_slice();

  /// Begins one collective, which ends when the host has waited for the first that is open with the same operation and subject.
  void begin_collective(TimelineEvent collective);
  /// Sets the bytes of the collective that was launched last.
  void set_bytes(int64_t bytes);
  void end_collective(const char* operation, const std::string& subject, bool is_given_up);

  /// Writes down the bytes that are held from now on.
  void count_bytes(int64_t unsharded, int64_t packed);

  /// Returns all that was recorded; what is still open ends now.
  Timeline take();

 private:
  struct Open {
    size_t event;
    TimelineEvent::Kind kind;
  };
  void open(TimelineEvent::Kind kind, std::string name);
  void close();
  bool innermost_is(TimelineEvent::Kind kind) const {
    return !open_.empty() && open_.back().kind == kind;
  }
  int64_t now_ns() const;

  Timeline timeline_;
  size_t max_events_;
  int64_t offset_ns_;            // wall clock minus steady clock
  std::vector<Open> open_;      // innermost last
  std::vector<size_t> launched_;  // collectives that are open, oldest first
  size_t last_launched_ = kNone;
  static constexpr size_t kNone = ~size_t{0};  // where there is no room any more
};

}  // namespace fsdp
