#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "group/residency_plan.hpp"

namespace fsdp {

class ParamGroup;
class UseTrace;

/// A root's byte budget (T4): the plan for the order that has been learned, made anew when that changes.
/// Without a budget, or without an order of both passes, it plans nothing.
class ResidencyBudget {
 public:
  struct Options {
    std::optional<int64_t> bytes;
    int prefetch_distance = 1;
    bool operator==(const Options&) const = default;
  };

  /// Between steps. groups: by number; null where one is gone. Throws StateError, naming what does not
  /// fit, if the budget is too small for what must be there.
  void update(const Options& options, const UseTrace& forward, const UseTrace& backward,
              std::span<ParamGroup* const> groups);
  /// What `update` would find changed is to be planned anew: a group's options.
  void invalidate() { is_current_ = false; }

  bool has_plan() const { return plan_.has_value(); }
  const ResidencyPlan& plan() const { return *plan_; }
  bool keeps_after_forward_use(size_t use) const { return plan_->keeps[use]; }
  bool keeps_after_backward_use(size_t use) const { return plan_->keeps[forward_uses_ + use]; }

 private:
  std::optional<ResidencyPlan> plan_;
  Options options_;
  size_t forward_uses_ = 0;
  int forward_lessons_ = -1, backward_lessons_ = -1;
  bool is_current_ = false;
};

/// The learned order and the groups' bytes and options, with `options.bytes` (set) as the budget.
ResidencyProblem residency_problem(const ResidencyBudget::Options& options, const UseTrace& forward,
                                   const UseTrace& backward, std::span<ParamGroup* const> groups);

}  // namespace fsdp
