#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/fully_shard.hpp"
#include "fsdp/statistics.hpp"

namespace fsdp {

/// One group of a sharded module. A module without parameters of its own to shard has one empty group. Bytes are of this rank.
struct FSDP_API GroupReport {
  std::string name;  ///< "root", or the path from it
  int depth = 0;     ///< the number of sharded modules that contain it
  size_t parameters = 0;
  int64_t sharded_bytes = 0;
  int64_t unsharded_bytes = 0;
  std::string layout;   ///< "Shard(0)", "Replicate(), Shard(1)", "flat", ...
  std::string reshard_after_forward;  ///< "true", "false", "2"; if unset, with its meaning: "unset (true)"
  /// Names and unsharded bytes of parameters that need no gradient, and of those that do.
  std::vector<std::string> frozen_parameters = {}, trainable_parameters = {};
  int64_t frozen_bytes = 0, trainable_bytes = 0;
  std::vector<std::string> exempt_parameters = {};  ///< of modules that MixedPrecisionPolicy::is_exempt names
  /// Bytes of zeros that are reduced for frozen parameters. Only in the flat layout, for parameters that were frozen after
  /// fully_shard beside others that were not.
  int64_t extra_gradient_bytes = 0;
};

/// What a step would gather under a byte budget, with the present order and settings: its forward and its backward, in bytes
/// of unsharded parameters. With set_reshard_after_backward(false) parameters that are written between steps are gathered once
/// more.
struct FSDP_API BudgetOutlook {
  int64_t budget_bytes = 0;
  int64_t gathered_bytes = 0;
  int64_t all_gathers = 0;
};

/// What a root holds and gathers, for people to read.
struct FSDP_API Report {
  std::vector<GroupReport> groups;
  /// Names of groups in the order in which a step uses them; empty before the first step.
  std::vector<std::string> forward_order, backward_order;
  ParameterBytes bytes;
  StepStatistics last_step;  ///< of the last complete step
  int64_t last_step_peak_bytes = 0;     ///< the most unsharded bytes at one time in it
  std::optional<int64_t> budget_bytes;  ///< set_unsharded_byte_budget
  /// The most unsharded bytes at one time that are planned under that budget; 0 without one. Gathers that run further ahead
  /// take room that is left, no more than the budget.
  int64_t planned_peak_bytes = 0;
  int64_t planned_gathered_bytes = 0;
  /// What a step would gather under several budgets, from the smallest that a step needs to the one with which each group is
  /// gathered once. Empty before an order is known, and where a step runs its forward more than once before backward, as a plan
  /// is for one forward.
  std::vector<BudgetOutlook> outlook;
  /// Operators on DTensors that could not run on the ranks' pieces, by name ("aten::mm"), with the number of calls. Each call
  /// gathered its operands, ran on whole tensors and kept this rank's part. Counted since the process began, over all its roots
  /// and, where ranks are threads, all its ranks. An operator that is composed of others counts as those. Operators of a
  /// module's forward and backward, which use unsharded parameters, are not in it.
  std::map<std::string, int64_t> gathering_operators;

  /// A table, with a note for each group that mixes frozen and trainable parameters.
  std::string to_string() const;
};

/// The report of the root of `module`. Call it outside a step. No communication.
FSDP_API Report report(const FSDPModule& module);

}  // namespace fsdp
