#include "schedule/residency_budget.hpp"

#include <fmt/format.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "schedule/exec_order.hpp"

namespace fsdp {

namespace {

/// For the message: what they are, and each with its bytes; "" where there are none.
template <class Picks>
std::string list_of(const char* what, std::span<const GroupFacts> groups, Picks picks) {
  std::string text;
  for (size_t i = 0; i < groups.size(); ++i)
    if (picks(i)) text += fmt::format("{}'{}' ({} bytes)", text.empty() ? "" : ", ", groups[i].name, groups[i].unsharded_bytes);
  return text.empty() ? "" : fmt::format("; {} ({})", what, text);
}

std::string refusal(const ResidencyProblem& problem, const ResidencyPlan& plan, int64_t budget,
                    std::span<const GroupFacts> groups) {
  const auto& used = groups[static_cast<size_t>(problem.uses[plan.fullest_use])];
  const auto kept = list_of("groups that stay by their reshard_after_forward = false", groups,
                            [&](size_t i) { return problem.rules[i] == KeepRule::kKept && problem.resident[i] == 0; });
  const auto resident = list_of("groups that stay by their reshard_after_backward = false", groups,
                                [&](size_t i) { return problem.resident[i] > 0; });
  return fmt::format(
      "unsharded byte budget: {} bytes are {} too few when '{}' ({} bytes) is used beside what stays unsharded{}{}; raise the "
      "budget, or leave their reshard_after_forward unset and their reshard_after_backward true",
      budget, plan.missing_bytes, used.name, used.unsharded_bytes, kept, resident);
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
  problem.beside = forward.learned_beside();
  for (const auto& [use, group] : backward.learned_beside()) problem.beside.push_back({problem.forward_uses + use, group});
  for (const auto& group : groups) {
    const int64_t bytes = group.is_never_released ? 0 : group.unsharded_bytes;
    // Kept between steps as well: its room is taken for good, and it is gathered when somebody writes.
    const int64_t resident = group.reshards_after_backward ? 0 : bytes;
    problem.budget -= resident;
    problem.resident.push_back(resident);
    problem.bytes.push_back(bytes - resident);
    problem.is_never_released.push_back(group.is_never_released);
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
  if (const auto refusal = try_update(options, forward, backward, groups)) [[unlikely]]
    throw StateError(*refusal);
}

std::optional<std::string> ResidencyBudget::try_update(const Options& options, const ExecOrder& forward,
                                                       const ExecOrder& backward, std::span<const GroupFacts> groups) {
  options_ = options;
  forward_lessons_ = forward.generation();
  backward_lessons_ = backward.generation();
  is_current_ = true;
  plan_.reset();
  if (!options.bytes || forward.learned().empty() || backward.learned().empty()) return std::nullopt;
  const auto problem = residency_problem(options, forward, backward, groups);
  auto plan = plan_residency(problem);
  if (plan.missing_bytes > 0) [[unlikely]] {
    is_current_ = false;  // every step is to say so
    return refusal(problem, plan, *options.bytes, groups);
  }
  if (!plan.prefetch_fits)
    info_once("unsharded byte budget: there is not always room to prefetch; some all-gathers do not overlap with compute");
  if (!plan.is_optimal())
    log().info("unsharded byte budget: the plan gathers {} bytes a step; no plan gathers less than {}",
               plan.gathered_bytes, plan.bound);
  forward_uses_ = problem.forward_uses;
  keeps_into_backward_.assign(groups.size(), false);
  for (size_t use = 0; use < forward_uses_; ++use)
    keeps_into_backward_[static_cast<size_t>(problem.uses[use])] = plan.keeps[use];
  plan_ = std::move(plan);
  return std::nullopt;
}

}  // namespace fsdp
