#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fully_shard.hpp"
#include "fsdp/statistics.hpp"

namespace fsdp {

/// One group of a sharded module of a root, in depth-first order; a module without parameters of its own
/// to shard has one of nothing. Bytes are of this rank.
struct GroupReport {
  std::string name;  ///< "root", or the path from it
  int depth = 0;     ///< sharded modules around it
  size_t parameters = 0;
  int64_t sharded_bytes = 0;
  int64_t unsharded_bytes = 0;
  std::string layout;   ///< "Shard(0)", "Replicate(), Shard(1)", "flat", ...
  std::string reshard_after_forward;  ///< "true", "false", "2", or what unset comes to: "unset (true)"
  /// Names and unsharded bytes of the parameters that need no gradient, and of those that do.
  std::vector<std::string> frozen_parameters = {}, trainable_parameters = {};
  int64_t frozen_bytes = 0, trainable_bytes = 0;
  /// Of gradients that are reduced for the frozen ones, as zeros: in the flat layout, for parameters that were frozen
  /// after fully_shard and lie in one run with others that were not.
  int64_t extra_gradient_bytes = 0;
};

/// What a step would gather under a byte budget, the order and explicit options being what they are.
struct BudgetOutlook {
  int64_t budget_bytes = 0;
  int64_t gathered_bytes = 0;
  int64_t all_gathers = 0;
};

/// What a root does, for a person.
struct Report {
  std::vector<GroupReport> groups;
  /// Names of groups in the order in which a step uses them; empty until one has shown it.
  std::vector<std::string> forward_order, backward_order;
  ParameterBytes bytes;
  StepStatistics last_step;  ///< of the last complete one
  int64_t last_step_peak_bytes = 0;     ///< most unsharded bytes at one time in it
  std::optional<int64_t> budget_bytes;  ///< set_unsharded_byte_budget
  int64_t planned_peak_bytes = 0;       ///< under that budget; 0 without one
  int64_t planned_gathered_bytes = 0;
  /// From the least budget that a step can do with, to the one that gathers everything once.
  std::vector<BudgetOutlook> outlook;
  /// Operators that could not run on the ranks' pieces of sharded tensors: each call gathered its operands, ran on the whole and
  /// kept this rank's part. By name ("aten::mm"), how many calls since this process began: of all its roots, and of all its ranks
  /// where they are threads. An operator made of others counts as those. Not among them: what a module's forward and backward run,
  /// which have the unsharded parameters, and what else autograd records.
  std::map<std::string, int64_t> gathering_operators;

  /// A table, with a note for each group that mixes frozen and trainable parameters.
  std::string to_string() const;
};

/// Of the root of `module`, outside a step. No communication.
Report report(const FSDPModule& module);

}  // namespace fsdp
