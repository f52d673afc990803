#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "fsdp/schedule_check.hpp"
#include "group/first_values.hpp"
#include "group/schedule_log.hpp"
#include "group/timeline_recorder.hpp"

namespace fsdp {

class ParamGroup;
class ScheduleWatch;

/// One collective that a group is about to launch.
struct CollectiveCall {
  Operation operation;
  ParamGroup& group;
  Communicator& comm;
  int64_t bytes;
  at::ScalarType dtype;
  uint64_t params = ScheduleEntry::kAllParams;  ///< see ScheduleEntry
};

/// Sees everything that a root does and decides nothing: it keeps the schedule and has it checked
/// (ScheduleWatch), shows ranges to a profiler (T19), and records a timeline. Where nobody asks for
/// the last two they cost a test each.
///
/// Not thread-safe: the root's lock guards it.
class StepObserver {
 public:
  StepObserver();
  ~StepObserver();

  /// Runs `start`, which launches the collective, and returns its result.
  /// Throws ScheduleError if the ranks are known to disagree, or if the launch fails because of it.
  template <class Start>
  auto launch(const CollectiveCall& call, Start&& start);
  /// Waits for the collective, if there is one, as the host does; throws as `launch` does.
  void wait(Operation operation, ParamGroup& group, const std::shared_ptr<Work>& work);
  /// What the collective launched last moves, where only the launch could tell.
  void note_bytes(int64_t bytes) {
    if (recorder_) recorder_->set_bytes(bytes);
  }
  /// Nobody will wait for it.
  void note_given_up(Operation operation, const ParamGroup& group);

  /// A step of these groups begins, the first of all at the first call: what their ranks began with is compared when it
  /// is over. Later calls do nothing.
  void note_beginnings(std::span<ParamGroup* const> groups) {
    if (!std::exchange(has_begun_, true)) take_beginnings(groups);
  }
  enum class Phase { kForward, kBackward };
  void begin_phase(Phase phase);
  void end_step();
  void abandon_step();
  /// Between those, operators use the group.
  void begin_use(const ParamGroup& group);
  void end_use() {
    if (recorder_) recorder_->end_use();
  }

  /// Looks whether anybody listens to ranges. Where the root is entered: the question costs 140
  /// instructions, and a group has a dozen ranges a step.
  void look_for_listener() { has_listener_ = recorder_ != nullptr || at::hasCallbacks(); }

  void set_check(const ScheduleCheckOptions& options) { check_ = options; }
  bool has_communicated() const { return schedule_ != nullptr; }
  void start_timeline(int rank, size_t max_events);
  /// Throws StateError if there is none.
  Timeline stop_timeline();

 private:
  friend class Range;
  class InCollective;
  void begin(const CollectiveCall& call);
  void leave() noexcept;
  [[noreturn]] void explain(const CommError& error);
  void start_watch(const CollectiveCall& call);
  void introduce(const ParamGroup& group);
  void take_beginnings(std::span<ParamGroup* const> groups);

  ScheduleCheckOptions check_;
  bool compares_every_entry_ = false, has_listener_ = false;
  std::shared_ptr<ScheduleLog> schedule_;  // from the first collective on
  std::unique_ptr<ScheduleWatch> watch_;   // null where there is nobody to compare with
  bool has_begun_ = false;
  std::vector<Beginning> beginnings_;      // until the first step is over
  std::vector<int> watched_;               // the ranks that it compares with
  std::vector<bool> is_apart_;             // by group: some of these are not its ranks, and may have other parameters
  std::unique_ptr<TimelineRecorder> recorder_;
};

/// Something that a root does for one of its modules, named as FSDP2 does: "FSDP::all_gather (blocks.3)".
/// A profiler shows it, and the timeline.
class Range {
 public:
  Range(StepObserver& observer, const char* what, const ParamGroup& group) {
    if (observer.has_listener_) [[unlikely]]
      begin(observer, what, group);
  }
  ~Range() {
    if (recorder_ != nullptr) [[unlikely]]
      recorder_->end_slice();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  void begin(StepObserver& observer, const char* what, const ParamGroup& group);

  std::optional<at::RecordFunction> profiled_;
  TimelineRecorder* recorder_ = nullptr;
};

/// While it lives the host is in a collective.
class StepObserver::InCollective {
 public:
  explicit InCollective(StepObserver& observer) : observer_(observer) {}
  ~InCollective() { observer_.leave(); }
  InCollective(const InCollective&) = delete;
  InCollective& operator=(const InCollective&) = delete;

 private:
  StepObserver& observer_;
};

template <class Start>
auto StepObserver::launch(const CollectiveCall& call, Start&& start) {
  const Range range(*this, names_of(call.operation).range, call.group);
  const InCollective inside(*this);
  try {
    begin(call);
    return start();
  } catch (const CommError& error) {
    explain(error);
  }
}

}  // namespace fsdp
