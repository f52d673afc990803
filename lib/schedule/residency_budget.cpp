#include "schedule/residency_budget.hpp"

#include <fmt/format.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "schedule/exec_order.hpp"

namespace fsdp {

namespace {

/// What has no choice, for the message.
std::string kept_groups(const ResidencyProblem& problem, std::span<const GroupFacts> groups) {
  std::string text;
  for (size_t i = 0; i < groups.size(); ++i)
    if (problem.rules[i] == KeepRule::kKept)
      text += fmt::format("{}'{}' ({} bytes)", text.empty() ? "" : ", ", groups[i].name, problem.bytes[i]);
  return text.empty() ? "none" : text;
}

KeepRule rule_of(const GroupFacts& group) {
  if (group.is_after_forward_unset) return KeepRule::kPlanned;
  return group.reshards_after_forward ? KeepRule::kReleased : KeepRule::kKept;
}

}  // namespace

ResidencyProblem residency_problem(const ResidencyBudget::Options& options, const ExecOrder& forward,
                                   const ExecOrder& backward, std::span<const GroupFacts> groups) {
  ResidencyProblem problem{.uses = forward.learned(),
                           .forward_uses = forward.learned().size(),
                           .bytes = {},
                           .rules = {},
                           .budget = *options.bytes,
                           .prefetch_distance = options.prefetch_distance};
  problem.uses.insert(problem.uses.end(), backward.learned().begin(), backward.learned().end());
  for (const auto& group : groups) {
    const int64_t bytes = group.is_never_released ? 0 : group.unsharded_bytes;
    // Kept between steps as well: its room is taken for good, and it is gathered when somebody writes.
    if (!group.reshards_after_backward) problem.budget -= bytes;
    problem.bytes.push_back(group.reshards_after_backward ? bytes : 0);
    problem.rules.push_back(rule_of(group));
  }
  return problem;
}

bool ResidencyBudget::is_current(const Options& options, const ExecOrder& forward, const ExecOrder& backward) const {
  return is_current_ && options == options_ && forward.generation() == forward_lessons_ &&
         backward.generation() == backward_lessons_;
}

void ResidencyBudget::update(const Options& options, const ExecOrder& forward, const ExecOrder& backward,
                             std::span<const GroupFacts> groups) {
  options_ = options;
  forward_lessons_ = forward.generation();
  backward_lessons_ = backward.generation();
  is_current_ = true;
  plan_.reset();
  if (!options.bytes || forward.learned().empty() || backward.learned().empty()) return;
  const auto problem = residency_problem(options, forward, backward, groups);
  auto plan = plan_residency(problem);
  if (plan.missing_bytes > 0) [[unlikely]] {
    is_current_ = false;  // every step is to say so
    throw StateError(fmt::format(
        "unsharded byte budget: {} bytes are {} too few for the group in use and the groups that stay unsharded by their "
        "reshard_after_forward = false ({}); raise the budget, or leave their reshard_after_forward unset",
        *options.bytes, plan.missing_bytes, kept_groups(problem, groups)));
  }
  if (!plan.prefetch_fits)
    info_once("unsharded byte budget: no room to prefetch; all-gathers do not overlap with compute");
  if (!plan.is_optimal())
    log().info("unsharded byte budget: the plan gathers {} bytes a step; no plan gathers less than {}",
               plan.gathered_bytes, plan.bound);
  forward_uses_ = problem.forward_uses;
  plan_ = std::move(plan);
}

}  // namespace fsdp
