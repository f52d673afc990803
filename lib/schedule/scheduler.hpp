#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "schedule/action.hpp"
#include "schedule/group_states.hpp"
#include "schedule/pass_orders.hpp"
#include "schedule/reduce_order.hpp"
#include "schedule/residency_budget.hpp"
#include "schedule/step_state.hpp"

namespace fsdp {

/// What happens to one group that is no operator's use of it.
enum class GroupEvent : uint8_t {
  kUserUnshards,
  kUserWaits,
  kUserReshards,
  kUserLetsGo,    ///< the forward that unshard() was for is over: released as if it had been gathered for that
  kListed,        ///< a prefetch list, perhaps of another root, names it
  kWritten,       ///< since it was gathered: gathered again when it is used
  kLastGradient,  ///< of this backward has arrived
  kComplete,      ///< amid a backward that reduces it, behind kLastGradient: it is packed
  kPacked,        ///< so it has been: its reduction starts, or waits
  kReduced,       ///< it has been packed at the end of a backward, where nothing follows
};

/// Decides when the groups of one root are gathered, released and reduced: events in, actions out. What it decides depends on
/// options, on facts and on the sequence of events alone, never on tensors, time or whether a collective has completed;
/// so all ranks, which have the same of these, launch the same sequence.
///
/// Whoever calls does the actions at once, in their order, before the next event. If one fails, or something else changes
/// where parameters are, `groups().set_residency` says so. Not thread-safe: the root's lock guards it.
class Scheduler {
 public:
  struct Options {
    int prefetch_distance = 1;  ///< groups that are gathered ahead of their use
    std::optional<int64_t> unsharded_byte_budget = {};
    ReduceScatterStart reduce_scatter_start = ReduceScatterStart::kBySize;
  };

  Options& options() { return options_; }
  GroupStates& groups() { return groups_; }
  const PassOrders& orders() const { return orders_; }
  ResidencyBudget& budget() { return budget_; }
  ReduceOrder& reduce_order() { return reduce_order_; }
  void remove(int group);

  // --- a step
  /// Releases what reads have left unsharded and nothing holds between steps. Call it before a step.
  Actions release_between_steps();
  /// Plans what stays unsharded under the byte budget, unless the plan is current. Call it after `release_between_steps`, when
  /// all facts are up to date. Throws StateError if the byte budget is too small for what must be there; not before a backward
  /// of a retained graph, whose gradients would be lost: the limit holds without a plan, too.
  void plan(StepEvent begins = StepEvent::kForwardBegins);
  void begin_forward(bool records_autograd);
  /// Begins the backward of the forward under way, or else one of a graph that was retained. Returns the groups that were
  /// gathered ahead of it.
  std::vector<int> begin_backward(bool is_of_forward);
  /// The forward or backward is over; gradients may still be under way.
  void end_pass() { orders_.end(); }
  enum class StepEnd : uint8_t {
    kMoreBackwards,  ///< it goes on before its gradients are read
    kBackward,
    kForward,        ///< that no backward follows
  };
  Actions end_step(StepEnd end);
  /// An exception, or reset_iter_state: all is released, nothing is learned.
  Actions abandon();

  // --- operators
  /// With the use of `used` the pass would begin again, as a second forward in front of a backward does.
  bool starts_over(std::span<const int> used) const { return orders_.would_start_over(used) && !is_part_of_last(used); }
  /// One is about to use `used`, in a step. written: those of `used` that have been written since they were gathered. Operators
  /// can read all of `used` behind the actions. What the last operator read stays where this one reads a part of that.
  Actions use(std::span<const int> used, std::span<const int> written);
  /// One reads `used` between steps.
  Actions read(std::span<const int> used, std::span<const int> written);
  enum class Reader : uint8_t {
    kHook,    ///< a user's, in a step
    kThread,  ///< beside others, at a time that differs between ranks: it decides nothing
  };
  /// One reads `used` whose place in a step says nothing.
  Actions read_beside(std::span<const int> used, std::span<const int> written, Reader reader = Reader::kHook);
  /// A user's hook is over: what it has read goes. before: `groups().held()` then.
  Actions end_user_hook(std::span<const int> before);
  /// Returns the groups of the last use.
  const std::vector<int>& current() const { return current_; }

  // --- one group
  Actions on(GroupEvent event, int group);

 private:
  using Groups = std::span<const int>;

  bool is_part_of_last(Groups used) const;
  bool note_use(Groups used, Actions& actions);
  void forget_uses();
  void on_written(int group, Actions& actions);
  void on_listed(int group, Actions& actions);
  void on_last_gradient(int group, Actions& actions);
  void on_complete(int group, Actions& actions);
  void on_packed(int group, Actions& actions);
  int gather_before_reduce(int group, Actions& actions);
  bool is_used_again(int group) const;
  /// In backward, behind its last gradient and before another group, as a backward since the order was learned showed.
  bool is_read_again(int group) const { return groups_[group].read_again_in >= orders_.learned_in(); }
  bool is_reduced(int group) const { return groups_[group].reduced_in == orders_.backwards(); }
  bool is_told_to_stay(int group) const;
  bool is_kept_on_purpose(int group) const;
  bool follows_plan() const;
  bool is_kept_by_plan(int group) const;
  bool is_needed(int group, Groups used) const;
  void release(int group, Actions& actions);
  void release_unneeded(Groups used, Actions& actions);
  void release_ahead_of_backward(Groups used, Actions& actions);
  void release_for_plan(Groups used, std::vector<int> left, Actions& actions);
  bool make_room(Groups used, int candidate, Actions& actions);
  void keep_budget(Groups gathered, Groups used, Actions& actions);
  bool has_room_ahead(int group) const;
  Groups beside_current(Groups used);
  /// Which groups others make room for.
  enum class Spares : uint8_t {
    kEnclosing,   ///< kept on purpose, or around what is used
    kOnPurpose,   ///< kept on purpose
    kUnsharded,   ///< by the user's `unshard`
  };
  /// Held ones that may make room, and the one of them that is used last.
  struct Others {
    size_t count = 0, distance = 0;
    int farthest = -1;
  };
  Others others_than(Groups used, Spares spares) const;
  size_t distance_to(int group) const;
  void gather(Groups used, Groups written, Actions& actions);
  void prefetch(Groups used, Actions& actions);
  int prefetch_upcoming(Groups used, Actions& actions);
  void prefetch_for_backward(Groups used, Actions& actions);

  Options options_;
  GroupStates groups_;
  PassOrders orders_;
  ResidencyBudget budget_;
  ReduceOrder reduce_order_;
  int gathered_before_pack_ = -1;
  std::vector<int> current_, beside_current_;
  std::vector<int> left_by_forward_;  // when backward begins, and nothing keeps them
  std::vector<int> last_used_;  // by the operator that went on in the order
};

}  // namespace fsdp
