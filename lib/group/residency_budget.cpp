#include "group/residency_budget.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "base/require.hpp"
#include "group/param_group.hpp"
#include "group/use_trace.hpp"

namespace fsdp {

namespace {

KeepRule rule_of(const ParamGroup& group) {
  const auto& policy = group.policy();
  if (policy.is_after_forward_unset) return KeepRule::kPlanned;
  return policy.after_forward.reshard ? KeepRule::kReleased : KeepRule::kKept;
}

/// What has no choice, for the message.
std::string kept_groups(const ResidencyProblem& problem, std::span<ParamGroup* const> groups) {
  std::string text;
  for (size_t i = 0; i < groups.size(); ++i)
    if (groups[i] != nullptr && problem.rules[i] == KeepRule::kKept)
      text += fmt::format("{}'{}' ({} bytes)", text.empty() ? "" : ", ", groups[i]->name(), problem.bytes[i]);
  return text.empty() ? "none" : text;
}

}  // namespace

ResidencyProblem residency_problem(const ResidencyBudget::Options& options, const UseTrace& forward,
                                   const UseTrace& backward, std::span<ParamGroup* const> groups) {
  ResidencyProblem problem{.uses = forward.learned(),
                           .forward_uses = forward.learned().size(),
                           .bytes = {},
                           .rules = {},
                           .budget = *options.bytes,
                           .prefetch_distance = options.prefetch_distance};
  problem.uses.insert(problem.uses.end(), backward.learned().begin(), backward.learned().end());
  for (const auto* group : groups) {
    const bool is_held = group != nullptr && !group->is_never_released();
    // Kept between steps as well: its room is taken for good, and it is gathered when somebody writes.
    const bool always_stays = is_held && !group->policy().reshard_after_backward;
    if (always_stays) problem.budget -= group->unsharded_bytes();
    problem.bytes.push_back(is_held && !always_stays ? group->unsharded_bytes() : 0);
    problem.rules.push_back(group ? rule_of(*group) : KeepRule::kPlanned);
  }
  return problem;
}

void ResidencyBudget::update(const Options& options, const UseTrace& forward, const UseTrace& backward,
                             std::span<ParamGroup* const> groups) {
  if (is_current_ && options == options_ && forward.lessons() == forward_lessons_ &&
      backward.lessons() == backward_lessons_)
    return;
  options_ = options;
  forward_lessons_ = forward.lessons();
  backward_lessons_ = backward.lessons();
  is_current_ = true;
  plan_.reset();
  if (!options.bytes || forward.learned().empty() || backward.learned().empty()) return;
  const auto problem = residency_problem(options, forward, backward, groups);
  auto plan = plan_residency(problem);
  if (plan.missing_bytes > 0) [[unlikely]] {
    is_current_ = false;  // every step is to say so
    throw StateError(fmt::format(
        "unsharded byte budget: {} bytes are {} too few for a group in use beside those that are kept "
        "whatever the budget ({}); raise it, or leave their reshard_after_forward unset",
        *options.bytes, plan.missing_bytes, kept_groups(problem, groups)));
  }
  if (!plan.prefetch_fits)
    info_once("unsharded byte budget: no room to gather ahead; gathers are not hidden behind compute");
  if (!plan.is_optimal())
    log().info("unsharded byte budget: the plan gathers {} bytes a step; no plan gathers less than {}",
               plan.gathered_bytes, plan.bound);
  forward_uses_ = problem.forward_uses;
  plan_ = std::move(plan);
}

}  // namespace fsdp
