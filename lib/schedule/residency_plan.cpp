#include "schedule/residency_plan.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace fsdp {

namespace {

/// A group stays between two of its uses, or not.
struct Interval {
  size_t use = 0;             // the first of the two
  std::vector<size_t> costs;  // uses in between at which nothing else has claimed its room yet
  int64_t bytes = 0;          // its room, and what is saved by keeping it
};

int64_t bytes_between_steps(const ResidencyProblem& problem) {
  return std::accumulate(problem.resident.begin(), problem.resident.end(), int64_t{0});
}

using GroupsByUse = std::vector<std::vector<int>>;

/// The groups that the operator of each use reads.
GroupsByUse operands_of(const ResidencyProblem& problem) {
  GroupsByUse groups;
  for (const int group : problem.uses) groups.push_back({group});
  for (const auto& [use, group] : problem.beside) groups[use].push_back(group);
  return groups;
}

/// Those that must be unsharded: these, and what is gathered ahead of the rest of their pass.
GroupsByUse must_be_there(const ResidencyProblem& problem, GroupsByUse groups, int ahead) {
  for (size_t t = 0; t < groups.size(); ++t) {
    const size_t end = t < problem.forward_uses ? problem.forward_uses : groups.size();
    const size_t most = groups[t].size() + static_cast<size_t>(ahead);
    for (size_t next = t + 1; next < end && groups[t].size() < most; ++next)
      if (std::find(groups[t].begin(), groups[t].end(), problem.uses[next]) == groups[t].end())
        groups[t].push_back(problem.uses[next]);
  }
  return groups;
}

class Search {
 public:
  Search(const std::vector<Interval>& intervals, std::vector<int64_t>& slack, int64_t limit)
      : intervals_(intervals), slack_(slack), limit_(limit), undecided_(slack.size(), 0),
        choice_(intervals.size(), false), best_choice_(intervals.size(), false), parent_(intervals.size(), kNone) {
    for (size_t i = 0; i < intervals.size(); ++i) {
      rest_ += intervals[i].bytes;
      for (const size_t t : intervals[i].costs) undecided_[t] += intervals[i].bytes;
      find_parent(i);
    }
    bound_ = upper_bound();
  }

  void run() {
    descend(0);
    if (nodes_ <= limit_) bound_ = best_;
  }
  const std::vector<bool>& choice() const { return best_choice_; }
  int64_t saved() const { return best_; }
  int64_t bound() const { return bound_; }

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  /// An interval inside this one, of as many bytes: wherever this one is kept, that one could be instead,
  /// so there is a best plan that keeps the inner one first.
  void find_parent(size_t i) {
    const auto& mine = intervals_[i].costs;
    for (size_t inner = i; inner-- > 0 && intervals_[inner].bytes == intervals_[i].bytes;) {
      const auto& its = intervals_[inner].costs;
      if (!std::includes(mine.begin(), mine.end(), its.begin(), its.end())) continue;
      parent_[i] = inner;
      return;
    }
  }

  /// At any one use, no more can be saved than what is not there then, and what fits.
  int64_t upper_bound() const {
    int64_t least = rest_;
    for (size_t t = 0; t < slack_.size(); ++t)
      least = std::min(least, rest_ - undecided_[t] + std::min(undecided_[t], slack_[t]));
    return saved_ + least;
  }

  void decide(size_t i, bool keep, int sign) {
    const auto& interval = intervals_[i];
    rest_ -= sign * interval.bytes;
    if (keep) saved_ += sign * interval.bytes;
    for (const size_t t : interval.costs) {
      undecided_[t] -= sign * interval.bytes;
      if (keep) slack_[t] -= sign * interval.bytes;
    }
    choice_[i] = keep && sign > 0;
  }

  void descend(size_t i) {
    if (++nodes_ > limit_) return;
    if (saved_ > best_) {
      best_ = saved_;
      best_choice_ = choice_;
    }
    if (i == intervals_.size() || best_ == bound_ || upper_bound() <= best_) return;
    const auto& [use, costs, bytes] = intervals_[i];
    const bool inner_is_kept = parent_[i] == kNone || choice_[parent_[i]];
    const bool fits = std::all_of(costs.begin(), costs.end(),
                                  [&, needed = bytes](size_t t) { return slack_[t] >= needed; });
    for (const bool keep : {true, false}) {
      if (keep && !(inner_is_kept && fits)) continue;
      decide(i, keep, 1);
      descend(i + 1);
      decide(i, keep, -1);
    }
  }

  const std::vector<Interval>& intervals_;
  std::vector<int64_t>& slack_;  // bytes left at each use
  const int64_t limit_;
  std::vector<int64_t> undecided_;  // bytes of the intervals that are, at each use
  std::vector<bool> choice_, best_choice_;
  std::vector<size_t> parent_;
  int64_t nodes_ = 0, rest_ = 0, saved_ = 0, best_ = 0, bound_ = 0;
};

class Planner {
 public:
  /// budget: in place of the problem's.
  Planner(const ResidencyProblem& problem, int ahead, int64_t budget) : problem_(problem), budget_(budget) {
    const auto operands = operands_of(problem);
    there_ = must_be_there(problem, operands, ahead);
    if (problem.forward_uses > 0) last_of_forward_ = operands[problem.forward_uses - 1];
    plan_.keeps.assign(problem.uses.size(), false);
    for (size_t t = 0; t < there_.size(); ++t) {
      at_once_.push_back(operands[t].size() > 1 ? bytes_at_once(operands[t]) : 0);
      slack_.push_back(std::max(budget, at_once_[t]) - bytes_of(there_[t]));
    }
    find_intervals();
    find_room();
  }

  /// The smallest budget that has room for what must be there.
  int64_t room() const { return room_; }

  ResidencyPlan solve(int64_t search_limit) {
    int64_t bound_saved = 0;
    if (room_ <= budget_) {
      // Large ones first, inner ones before those around them.
      std::stable_sort(candidates_.begin(), candidates_.end(), [](const Interval& a, const Interval& b) {
        return a.bytes != b.bytes ? a.bytes > b.bytes : a.costs.size() < b.costs.size();
      });
      Search search(candidates_, slack_, search_limit);
      search.run();
      for (size_t i = 0; i < candidates_.size(); ++i)
        if (search.choice()[i]) keep(candidates_[i]);
      bound_saved = search.bound() - search.saved();
    }
    plan_.missing_bytes = std::max<int64_t>(0, room_ - budget_);
    for (size_t t = 0; t < slack_.size(); ++t) plan_.peak_bytes = std::max(plan_.peak_bytes, bytes_at(t));
    plan_.peak_bytes += bytes_between_steps(problem_);
    count_gathers();
    plan_.bound = plan_.gathered_bytes - bound_saved;
    return std::move(plan_);
  }

 private:
  int64_t bytes_of(int group) const { return problem_.bytes[static_cast<size_t>(group)]; }
  int64_t bytes_of(const std::vector<int>& groups) const {
    int64_t bytes = 0;
    for (const int group : groups) bytes += bytes_of(group);
    return bytes;
  }
  /// Of a whole budget, the rest of what stays between steps takes its room from one operator's as well.
  int64_t bytes_at_once(const std::vector<int>& groups) const {
    int64_t bytes = bytes_of(groups);
    for (size_t group = 0; group < problem_.resident.size(); ++group)
      if (std::find(groups.begin(), groups.end(), static_cast<int>(group)) == groups.end()) bytes -= resident_bytes(group);
    return bytes;
  }
  /// Behind a use. What stays between steps is not released in backward, so not behind the last use of forward either.
  KeepRule rule_behind(size_t use, int group) const {
    const bool is_last = std::find(last_of_forward_.begin(), last_of_forward_.end(), group) != last_of_forward_.end();
    const bool stays = resident_bytes(static_cast<size_t>(group)) > 0 && (is_last || use >= problem_.forward_uses);
    return stays ? KeepRule::kKept : problem_.rules[static_cast<size_t>(group)];
  }

  /// Of what has no choice so far.
  int64_t bytes_at(size_t use) const { return std::max(budget_, at_once_[use]) - slack_[use]; }

  void find_room() {
    for (size_t t = 0; t < slack_.size(); ++t) {
      if (bytes_at(t) <= std::max(room_, at_once_[t])) continue;
      room_ = bytes_at(t);
      plan_.fullest_use = t;
    }
  }

  void find_intervals() {
    std::vector<size_t> last(problem_.bytes.size(), kNever);
    for (size_t t = 0; t < problem_.uses.size(); ++t) {
      const int group = problem_.uses[t];
      auto& before = last[static_cast<size_t>(group)];
      if (before != kNever) add_interval(before, t, group);
      before = t;
    }
    // Told to stay, and not used in backward (a first layer's weight).
    for (size_t group = 0; group < last.size(); ++group)
      if (problem_.rules[group] == KeepRule::kKept && last[group] < problem_.forward_uses)
        keep(interval_of(last[group], problem_.forward_uses, static_cast<int>(group)));
  }

  Interval interval_of(size_t from, size_t to, int group) const {
    Interval interval{.use = from, .costs = {}, .bytes = bytes_of(group)};
    for (size_t t = from + 1; t < to; ++t)
      if (std::find(there_[t].begin(), there_[t].end(), group) == there_[t].end()) interval.costs.push_back(t);
    return interval;
  }

  void add_interval(size_t from, size_t to, int group) {
    auto interval = interval_of(from, to, group);
    const bool crosses = from < problem_.forward_uses && to >= problem_.forward_uses;
    const auto rule = rule_behind(from, group);
    if (rule == KeepRule::kKept || interval.costs.empty())
      keep(interval);
    else if (crosses && rule == KeepRule::kReleased)
      return;
    else if (interval.bytes == 0)
      keep(interval);
    else
      candidates_.push_back(std::move(interval));
  }

  void keep(const Interval& interval) {
    plan_.keeps[interval.use] = true;
    for (const size_t t : interval.costs) slack_[t] -= interval.bytes;
  }

  int64_t resident_bytes(size_t group) const { return problem_.resident.empty() ? 0 : problem_.resident[group]; }

  /// What stays between steps is there when one begins, unless a forward releases it for good.
  std::vector<bool> held_at_first() const {
    std::vector<bool> is_there(problem_.bytes.size(), false), is_known(problem_.bytes.size(), false);
    for (size_t t = 0; t < problem_.uses.size(); ++t) {
      const auto group = static_cast<size_t>(problem_.uses[t]);
      const bool goes = t < problem_.forward_uses ? rule_behind(t, problem_.uses[t]) == KeepRule::kReleased
                                                  : !is_known[group] && problem_.rules[group] == KeepRule::kReleased;
      is_there[group] = resident_bytes(group) > 0 && !goes;
      is_known[group] = is_known[group] || t < problem_.forward_uses;
    }
    return is_there;
  }

  void count_gathers() {
    auto is_there = held_at_first();
    for (size_t t = 0; t < problem_.uses.size(); ++t) {
      const auto group = static_cast<size_t>(problem_.uses[t]);
      const int64_t bytes = problem_.bytes[group] + resident_bytes(group);
      const bool is_gathered = problem_.is_never_released.empty() || !problem_.is_never_released[group];
      if (!is_there[group] && is_gathered) {
        plan_.gathered_bytes += bytes;
        ++plan_.all_gathers;
      }
      is_there[group] = plan_.keeps[t];
    }
  }

  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  const ResidencyProblem& problem_;
  const int64_t budget_;
  GroupsByUse there_;
  std::vector<int> last_of_forward_;
  std::vector<int64_t> at_once_;  // by use: bytes that one operator of several groups reads
  std::vector<int64_t> slack_;
  std::vector<Interval> candidates_;
  int64_t room_ = 0;
  ResidencyPlan plan_;
};

}  // namespace

ResidencyPlan plan_residency(const ResidencyProblem& problem, int64_t search_limit) {
  const auto with_nothing_ahead = [&](int64_t budget) {
    auto plan = Planner(problem, /*ahead=*/0, budget).solve(search_limit);
    if (problem.prefetch_distance == 0) return plan;
    plan.prefetch_fits = false;
    // What is gathered ahead takes whatever room there is.
    plan.peak_bytes = std::max(plan.peak_bytes, problem.budget + bytes_between_steps(problem));
    return plan;
  };
  Planner planner(problem, problem.prefetch_distance, problem.budget);
  if (problem.prefetch_distance == 0 || planner.room() > problem.budget) return with_nothing_ahead(problem.budget);
  auto plan = planner.solve(search_limit);
  // The best of all budgets that have no room ahead.
  auto smaller = with_nothing_ahead(planner.room() - 1);
  return smaller.missing_bytes == 0 && smaller.gathered_bytes < plan.gathered_bytes ? smaller : plan;
}

}  // namespace fsdp
