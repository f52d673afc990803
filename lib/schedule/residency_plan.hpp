#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/exec_order.hpp"

namespace fsdp {

/// What a group's options say about the time after forward.
enum class KeepRule {
  kPlanned,   ///< nothing: the plan decides
  kReleased,  ///< released (or kept in part only) until its first use in backward, whatever the budget
  kKept,      ///< kept from its first use until its last in backward, or forward's end, whatever the budget
};

/// One step's uses of groups, in order, and the memory that may be spent on keeping them.
struct ResidencyProblem {
  std::vector<int> uses;         ///< group numbers: forward's, then backward's
  size_t forward_uses = 0;       ///< how many of them are forward's
  std::vector<int64_t> bytes;    ///< by group, unsharded
  std::vector<KeepRule> rules;   ///< by group
  int64_t budget = 0;            ///< bytes of unsharded parameters at any one time
  int prefetch_distance = 1;     ///< groups that are gathered ahead of their use
  /// Which other groups must be there at a use, as one operator reads them all.
  std::vector<ExecOrder::Beside> beside = {};
  /// Says by group whether it is there without a gather; empty: none is. One of no bytes (a slice of no elements) is gathered.
  std::vector<bool> is_never_released = {};
  /// Gives by group the bytes of one that stays between steps, for which neither `bytes` nor `budget` has room. Empty: there is
  /// none.
  std::vector<int64_t> resident = {};
};

/// Which groups stay between two uses.
struct ResidencyPlan {
  std::vector<bool> keeps;      ///< by use: the group stays until its next use
  int64_t gathered_bytes = 0;   ///< of one step
  int64_t all_gathers = 0;      ///< of one step
  int64_t bound = 0;            ///< no plan of this kind (`prefetch_fits`) gathers less
  int64_t peak_bytes = 0;       ///< most unsharded bytes at any use, with what is gathered ahead
  /// Bytes by which the budget is too small for what must be there (groups in use and those with
  /// kKept); 0 if it is not. Then nothing else is kept.
  int64_t missing_bytes = 0;
  size_t fullest_use = 0;  ///< where the most must be there
  /// False: there is no room for the groups gathered ahead at each use; where there is none, they wait for their use.
  bool prefetch_fits = true;
  bool is_optimal() const { return gathered_bytes == bound; }
};

/// The plan that gathers the fewest bytes: keep a set of intervals between uses of one group, such that
/// at every use what is kept, what is used and what is gathered ahead is within the budget. An interval's
/// cost and gain are both its group's bytes, a packing problem on a line (for equal sizes Belady's rule
/// solves it; NP-hard otherwise). Found by branch and bound, which ends with a proof for the traces of
/// models (few different sizes); after `search_limit` nodes the best so far is taken, and `bound` tells
/// how far it may be from the best.
///
/// A larger budget never gathers more: the room ahead is given up where it would cost gathers that a budget too small for it
/// does not have. What one operator reads together is there whatever the budget.
ResidencyPlan plan_residency(const ResidencyProblem& problem, int64_t search_limit = 200'000);

}  // namespace fsdp
