#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "schedule/group_facts.hpp"
#include "schedule/residency_plan.hpp"

namespace fsdp {

class ExecOrder;

/// A root's byte budget: the plan for the order that has been learned, made anew when that changes.
/// Without a budget, or without an order of both passes, it plans nothing.
class ResidencyBudget {
 public:
  struct Options {
    std::optional<int64_t> bytes;
    int prefetch_distance = 1;
    bool operator==(const Options&) const = default;
  };

  /// True if neither options nor orders have changed since the last `update`, and nobody has called `invalidate`.
  bool is_current(const Options& options, const ExecOrder& forward, const ExecOrder& backward) const;
  /// Between steps. groups: by number. Throws StateError, naming what does not fit, if the budget is too small for what
  /// must be there.
  void update(const Options& options, const ExecOrder& forward, const ExecOrder& backward,
              std::span<const GroupFacts> groups);
  /// As `update`, but says so: then there is no plan.
  [[nodiscard]] std::optional<std::string> try_update(const Options& options, const ExecOrder& forward,
                                                      const ExecOrder& backward, std::span<const GroupFacts> groups);
  /// The groups' facts have changed.
  void invalidate() { is_current_ = false; }

  bool has_plan() const { return plan_.has_value(); }
  const ResidencyPlan& plan() const { return *plan_; }
  bool keeps_after_forward_use(size_t use) const { return plan_->keeps[use]; }
  bool keeps_after_backward_use(size_t use) const { return plan_->keeps[forward_uses_ + use]; }
  /// Returns whether the plan keeps the group after its last use in forward. True for a group that the plan does not know.
  bool keeps_into_backward(int group) const {
    const auto index = static_cast<size_t>(group);
    return index >= keeps_into_backward_.size() || keeps_into_backward_[index];
  }

 private:
  std::optional<ResidencyPlan> plan_;
  std::vector<bool> keeps_into_backward_;  // by group
  Options options_;
  size_t forward_uses_ = 0;
  int forward_lessons_ = -1, backward_lessons_ = -1;
  bool is_current_ = false;
};

/// The learned order and the groups' facts, with `options.bytes` (set) as the budget.
ResidencyProblem residency_problem(const ResidencyBudget::Options& options, const ExecOrder& forward,
                                   const ExecOrder& backward, std::span<const GroupFacts> groups);

}  // namespace fsdp
