#include "fsdp/report.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "api/params/find_param.hpp"
#include "comm/work.hpp"
#include "dtensor/rules/propagate.hpp"
#include "group/notes/frozen_mixture.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "root/root_context.hpp"

namespace fsdp {

namespace {

std::string layout_of(const std::shared_ptr<ParamGroup>& group) {
  if (group->parts().config.layout == ParamLayout::kFlat) return "flat";
  std::set<std::string> kinds;  // parameters may be cut along different dimensions
  for (size_t i = 0; i < group->params().size(); ++i) {
    if (group->params()[i].has_moved_away) continue;
    std::string text;
    for (const auto& placement : placements_of({group, i, /*is_unsharded_param=*/false}))
      text += (text.empty() ? "" : ", ") + to_string(placement);
    kinds.insert(std::move(text));
  }
  return fmt::format("{}", fmt::join(kinds, " or "));
}

std::string reshard_text(const ParamGroup& group) {
  const auto& policy = group.options().residency;
  const auto& plan = policy.after_forward;
  const std::string value = plan.post_forward_group ? std::to_string(plan.ranks) : plan.reshard ? "true" : "false";
  return policy.is_after_forward_unset ? "unset (" + value + ")" : value;
}

size_t parameters_of(const ParamGroup& group) {
  return static_cast<size_t>(std::count_if(group.params().begin(), group.params().end(),
                                           [](const FSDPParam& param) { return !param.has_moved_away; }));
}

/// Names of parameters that the policy would cast, had it not exempted their modules.
std::vector<std::string> exempt_parameters(const ParamGroup& group) {
  std::vector<std::string> names;
  if (!group.parts().config.mp_policy.param_dtype) return names;
  for (const auto& param : group.params())
    if (!param.has_moved_away && param.spec.output_dtype) names.push_back(param.name());
  return names;
}

void add_groups(ModuleState& state, int depth, Report& report) {
  const auto groups = state.live_groups();
  for (const auto& group : groups) {
    const auto mixture = mixture_of(*group);
    report.groups.push_back({.name = group->name(),
                             .depth = depth,
                             .parameters = parameters_of(*group),
                             .sharded_bytes = group->parts().layout.stored().rank_bytes(),
                             .unsharded_bytes = group->parts().unsharded_bytes(),
                             .layout = layout_of(group),
                             .reshard_after_forward = reshard_text(*group),
                             .frozen_parameters = mixture.frozen.names,
                             .trainable_parameters = mixture.trainable.names,
                             .frozen_bytes = mixture.frozen.bytes,
                             .trainable_bytes = mixture.trainable.bytes,
                             .exempt_parameters = exempt_parameters(*group),
                             .extra_gradient_bytes = mixture.extra_gradient_bytes});
  }
  if (groups.empty())
    report.groups.push_back({.name = state.tree().description(), .depth = depth, .layout = {}, .reshard_after_forward = {}});
  for (const auto& below : state.tree().nested()) add_groups(*below, depth + 1, report);
}

std::vector<std::string> names_of(const std::vector<int>& uses, std::span<ParamGroup* const> groups) {
  std::vector<std::string> names;
  for (const int id : uses) {
    const auto* group = groups[static_cast<size_t>(id)];
    names.push_back(group ? group->name() : "(gone)");
  }
  return names;
}

std::string exempt_note_of(const GroupReport& group) {
  if (group.exempt_parameters.empty()) return "";
  return fmt::format("  {:{}}  note: exempt from mixed precision: {}\n", "", 2 * group.depth,
                     fmt::join(group.exempt_parameters, ", "));
}

/// "" for a group of one kind.
std::string note_of(const GroupReport& group) {
  const FrozenMixture mixture{.frozen = {group.frozen_bytes, group.frozen_parameters},
                              .trainable = {group.trainable_bytes, group.trainable_parameters},
                              .extra_gradient_bytes = group.extra_gradient_bytes};
  if (!mixture.is_mixed()) return "";
  return fmt::format("  {:{}}  note: {}\n", "", 2 * group.depth, mixture.to_string());
}

/// Between the smallest budget and the one for everything, as many steps as a table is good for.
std::vector<BudgetOutlook> outlook_of(ResidencyProblem problem) {
  constexpr int kRows = 8;
  int64_t always = 0, all = 0, largest = 0;  // a budget is no smaller than one group
  for (size_t group = 0; group < problem.bytes.size(); ++group) {
    const int64_t bytes = problem.bytes[group] + problem.resident[group];
    always += problem.resident[group];
    all += bytes;
    largest = std::max(largest, bytes);
  }
  problem.budget = 0;
  const int64_t least = std::max(plan_residency(problem).missing_bytes + always, largest);
  problem.budget = all;  // beside what is always there: room for anything
  const int64_t most = std::max(plan_residency(problem).peak_bytes, least);
  std::vector<BudgetOutlook> outlook;
  for (int row = 0; row < kRows; ++row) {
    const int64_t budget = least + (most - least) * row / (kRows - 1);
    problem.budget = budget - always;
    const auto plan = plan_residency(problem);
    if (outlook.empty() || budget > outlook.back().budget_bytes)
      outlook.push_back({budget, plan.gathered_bytes, plan.all_gathers});
  }
  return outlook;
}

/// The most frequent ones first; "" for none.
std::string gathering_text(const std::map<std::string, int64_t>& calls) {
  std::vector<std::pair<std::string, int64_t>> sorted(calls.begin(), calls.end());
  std::ranges::stable_sort(sorted, std::greater(), [](const auto& operator_calls) { return operator_calls.second; });
  std::string text;
  for (const auto& [name, count] : sorted)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, with_separators(count));
  return text.empty() ? "" : "calls in this process that gathered sharded tensors to run on the whole: " + text + "\n";
}

}  // namespace

Report FSDPModule::report() const { return fsdp::report(*this); }

Report report(const FSDPModule& module) {
  const auto root = handles::state(module).root();
  auto& context = *root->context();
  std::lock_guard lock(context.mutex());
  Report report;
  add_groups(*root, 0, report);
  report.bytes = parameter_bytes(handles::module(root));
  report.last_step = context.runner().comm_ctx().meter.last_step();
  report.last_step_peak_bytes = context.runner().comm_ctx().meter.last_step_peak_bytes();
  report.gathering_operators = general_rule_counts();
  auto& scheduler = context.runner().scheduler();
  const auto& orders = scheduler.orders();
  report.budget_bytes = scheduler.options().unsharded_byte_budget;
  const auto& groups = context.runner().groups_by_id();
  report.forward_order = names_of(orders.forward().learned(), groups);
  report.backward_order = names_of(orders.backward().learned(), groups);
  if (report.forward_order.empty() || report.backward_order.empty()) return report;
  if (scheduler.budget().has_plan()) {
    report.planned_peak_bytes = scheduler.budget().plan().peak_bytes;
    report.planned_gathered_bytes = scheduler.budget().plan().gathered_bytes;
  }
  // A plan is for one forward, and says nothing of what the next ones gather.
  if (orders.repeats_forward()) return report;
  report.outlook = outlook_of(residency_problem({.bytes = 0, .prefetch_distance = scheduler.options().prefetch_distance},
                                                orders.forward(), orders.backward(), scheduler.groups().facts()));
  return report;
}

std::string Report::to_string() const {
  const auto shown = &with_separators;
  std::string text = "sharded modules (parameters; bytes sharded, unsharded; placement; reshard_after_forward):\n";
  for (const auto& group : groups) {
    text += fmt::format("  {:{}}{}: {}; {}, {}; {}; {}\n", "", 2 * group.depth, group.name, group.parameters,
                        shown(group.sharded_bytes), shown(group.unsharded_bytes), group.layout,
                        group.reshard_after_forward);
    text += note_of(group) + exempt_note_of(group);
  }
  text += fmt::format("bytes on this rank: {} sharded, {} unsharded now, {} at most\n", shown(bytes.sharded),
                      shown(bytes.unsharded), shown(bytes.peak_unsharded));
  text += gathering_text(gathering_operators);
  if (forward_order.empty() || backward_order.empty())
    return text + "no step has shown the order of use yet\n";
  text += fmt::format("order of use: forward {}; backward {}\n", fmt::join(forward_order, ", "),
                      fmt::join(backward_order, ", "));
  text += fmt::format("last step: {} all-gathers of {} bytes, {} reductions of {} bytes, at most {} bytes unsharded\n",
                      last_step.all_gathers, shown(last_step.gathered_bytes), last_step.reductions,
                      shown(last_step.reduced_bytes), shown(last_step_peak_bytes));
  if (last_step.offloaded_bytes > 0)
    text += fmt::format("copied between host and device: {} bytes\n", shown(last_step.offloaded_bytes));
  if (planned_peak_bytes > 0)
    text += fmt::format("byte budget {}: planned peak {}, planned gathers {} bytes a step\n",
                        shown(budget_bytes.value_or(0)), shown(planned_peak_bytes), shown(planned_gathered_bytes));
  text += "under a byte budget of ... a step would do ... all-gathers of ... bytes:\n";
  for (const auto& [budget, gathered, gathers] : outlook)
    text += fmt::format("  {}: {}, {}\n", shown(budget), gathers, shown(gathered));
  return text;
}

}  // namespace fsdp
