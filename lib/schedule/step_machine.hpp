#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step_state.hpp"

namespace fsdp {

/// Where a root is in its step (step_state.hpp), and what is under way in it: autograd's tasks, the user's scopes, and who
/// has asked that no step begins. Not thread-safe: the root's lock guards it.
class StepMachine {
 public:
  StepState state() const { return state_; }
  /// Nothing is under way, nor left to be finalized or waited for, and no scope is open.
  bool is_quiescent() const { return state_ == StepState::kIdle && scopes_ == 0; }

  /// Throws StateError where the event is an error now; a step that is pinned may not begin.
  void check(StepEvent event) const;
  /// The event has happened. Throws as `check`; nothing has changed then.
  void on(StepEvent event);

  /// Autograd's task is under way: it has begun a backward of this root's, or one inside that.
  bool has_task(int64_t task) const;
  size_t task_count() const { return tasks_.size(); }
  void begin_task(int64_t task) { tasks_.push_back(task); }
  enum class TaskEnd { kUnknown, kNested, kOutermost };
  /// It is over, and with it those that have begun inside it. kUnknown: it was given up in the meantime.
  TaskEnd end_task(int64_t task);

  bool is_in_scope() const { return scopes_ > 0; }
  void enter_scope() { ++scopes_; }
  void leave_scope() { --scopes_; }

  /// No step may begin until `unpin`, as parameters show other memory for a while. Counts.
  void pin() { ++pins_; }
  void unpin() { --pins_; }
  bool is_pinned() const { return pins_ > 0; }

  /// Something in this forward needs a backward.
  void note_autograd() { records_autograd_ = true; }
  bool records_autograd() const { return records_autograd_; }

  /// Backwards are finalized by hand. Throws StateError while one is under way, or not finalized and waited for.
  void set_manual_finalization(bool value);
  bool is_manual() const { return is_manual_; }
  /// Returns the ticket of the last finalization, from 1 on; 0 before the first.
  int64_t ticket() const { return ticket_; }
  /// Throws StateError unless that one's gradients are still to be waited for.
  void check_ticket(int64_t ticket) const;

 private:
  StepState state_ = StepState::kIdle;
  std::vector<int64_t> tasks_;  // under way, outermost first
  int scopes_ = 0, pins_ = 0;
  bool records_autograd_ = false, is_manual_ = false;
  int64_t ticket_ = 0;
};

}  // namespace fsdp
