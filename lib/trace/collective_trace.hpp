#pragma once

#include <ATen/record_function.h>

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/watch/thread_in_group.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "fsdp/schedule_check_options.hpp"
#include "trace/collective_log.hpp"
#include "trace/first_values.hpp"
#include "trace/group_channels.hpp"
#include "trace/group_identity.hpp"
#include "trace/step_meter.hpp"
#include "trace/timeline_recorder.hpp"

namespace fsdp {

class DesyncWatch;

/// One collective that a group is about to launch.
struct CollectiveCall {
  Operation operation;
  const GroupIdentity& group;
  Communicator& comm;
  int64_t bytes;
  at::ScalarType dtype;
  uint64_t params = CollectiveEntry::kAllParams;  ///< see CollectiveEntry
};

/// What a group's parameters held when it was sharded, and what has been written since.
struct FirstValuesOfGroup {
  const GroupIdentity& group;
  std::unique_ptr<FirstValues> values;
  std::vector<int64_t> versions;  ///< of the sharded parameters, now
};

/// Follows all that a root does and decides nothing: it keeps a log of the collectives, has it compared with the other ranks'
/// (DesyncWatch), shows ranges to a profiler, and records a timeline. Where nobody asks for the last two they cost a test each.
///
/// Not thread-safe: the root's lock guards it.
class CollectiveTrace {
 public:
  /// meter: is told how long the host waits.
  explicit CollectiveTrace(StepMeter& meter);
  ~CollectiveTrace();

  // --- the root's groups
  void add(const GroupIdentity& group) { groups_.push_back(&group); }
  void remove(const GroupIdentity& group) { std::erase(groups_, &group); }

  /// Runs `start`, which launches the collective, and returns its result.
  /// Throws ScheduleError if the ranks are known to disagree, or if the launch fails because of it.
  template <class Start>
  auto launch(const CollectiveCall& call, Start&& start);
  /// Waits for the collective, if there is one, as the host does; throws as `launch` does.
  void wait(Operation operation, const GroupIdentity& group, const std::shared_ptr<Work>& work);
  /// Notes how many bytes the collective launched last moves, where only the launch could tell.
  void note_bytes(int64_t bytes) {
    if (recorder_) recorder_->set_bytes(bytes);
  }
  /// Throws what ranks that part, or do not answer, have to do with the failure of a collective beside those launched here,
  /// else `error`. To be called in its handler.
  [[noreturn]] void explain(const CommError& error);
  /// Notes that nobody will wait for the collective.
  void note_given_up(Operation operation, const GroupIdentity& group);

  /// Keeps what this rank began with, which is compared with the others' when the first step is over.
  void note_first_values(std::vector<FirstValuesOfGroup> all);
  enum class Phase { kForward, kBackward };
  void begin_phase(Phase phase);
  void end_step();
  void abandon_step();
  /// Notes that operators use this group from now on; null: none.
  void note_use(const GroupIdentity* group) {
    if (recorder_) [[unlikely]]
      show_use(group);
  }

  /// Looks whether anybody listens to ranges. To be called where the root is entered: the question costs 140 instructions, and
  /// a group has a dozen ranges a step.
  void look_for_listener() { has_listener_ = recorder_ != nullptr || at::hasCallbacks(); }
  bool has_listener() const { return has_listener_; }
  /// Returns the timeline's recorder; null: nobody wants a timeline.
  TimelineRecorder* recorder() { return recorder_.get(); }

  /// Throws StateError once the root has communicated.
  void set_check(const ScheduleCheckOptions& options);
  void start_timeline(int rank, size_t max_events);
  /// Throws StateError if there is none.
  Timeline stop_timeline();

 private:
  class InCollective;
  void begin(const CollectiveCall& call, InCollective& inside);
  void compare_entry(const CollectiveCall& call);
  void leave() noexcept;
  void show_use(const GroupIdentity* group);
  void start_watch(const CollectiveCall& call);
  void introduce(const GroupIdentity& group);

  std::vector<const GroupIdentity*> groups_;
  ScheduleCheckOptions check_;
  bool compares_every_entry_ = false, has_listener_ = false;
  std::shared_ptr<CollectiveLog> log_;    // from the first collective on
  std::unique_ptr<DesyncWatch> watch_;    // null where there is nobody to compare with
  std::vector<Beginning> beginnings_;     // until the first step is over
  std::vector<int> watched_;              // the ranks that it compares with
  std::vector<bool> is_apart_;            // by group: some of these are not its ranks, and may have other parameters
  GroupChannels channels_;
  std::unique_ptr<TimelineRecorder> recorder_;
  StepMeter& meter_;
};

/// Shows a profiler, and the timeline, something that a root does for one of its modules, named as FSDP2 does:
/// "FSDP::all_gather (blocks.3)".
class Range {
 public:
  Range(CollectiveTrace& trace, const char* what, const GroupIdentity& group) {
    if (trace.has_listener()) [[unlikely]]
      begin(trace, name_of(what, group));
  }
  /// name: () -> the whole name; asked where somebody listens.
  template <std::invocable Name>
  Range(CollectiveTrace& trace, Name&& name) {
    if (trace.has_listener()) [[unlikely]]
      begin(trace, name());
  }
  ~Range() {
    if (recorder_ != nullptr) [[unlikely]]
      recorder_->end_slice();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  static std::string name_of(const char* what, const GroupIdentity& group);
  void begin(CollectiveTrace& trace, std::string name);

  std::optional<at::RecordFunction> profiled_;
  TimelineRecorder* recorder_ = nullptr;
};

/// While it lives the host is in a collective.
class CollectiveTrace::InCollective {
 public:
  explicit InCollective(CollectiveTrace& trace) : trace_(trace) {}
  ~InCollective() { trace_.leave(); }
  InCollective(const InCollective&) = delete;
  InCollective& operator=(const InCollective&) = delete;

  /// Notes that this thread is in the communicator from now on. Throws ScheduleError where another one is.
  void enter(const GroupChannels::Channel& channel, Operation operation, const GroupIdentity& group) {
    if (channel.place) thread_.emplace(*channel.comm, channel.place, OneThread::Use{names_of(operation).plain, group.name});
  }

 private:
  CollectiveTrace& trace_;
  std::optional<ThreadInGroup> thread_;
};

template <class Start>
auto CollectiveTrace::launch(const CollectiveCall& call, Start&& start) {
  const Range range(*this, names_of(call.operation).range, call.group);
  InCollective inside(*this);
  try {
    begin(call, inside);
    return start();
  } catch (const CommError& error) {
    explain(error);
  }
}

}  // namespace fsdp
