#include "schedule/residency_plan.hpp"

#include <algorithm>
#include <limits>

namespace fsdp {

namespace {

/// A group stays between two of its uses, or not.
struct Interval {
  size_t use = 0;             // the first of the two
  std::vector<size_t> costs;  // uses in between at which nothing else has claimed its room yet
  int64_t bytes = 0;          // its room, and what is saved by keeping it
};

/// The groups that must be unsharded at each use: the one used, and those gathered ahead of the rest of
/// their pass.
std::vector<std::vector<int>> must_be_there(const ResidencyProblem& problem, int ahead) {
  std::vector<std::vector<int>> groups(problem.uses.size());
  for (size_t t = 0; t < groups.size(); ++t) {
    const size_t end = t < problem.forward_uses ? problem.forward_uses : groups.size();
    for (size_t next = t; next < end && groups[t].size() <= static_cast<size_t>(ahead); ++next)
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
  Planner(const ResidencyProblem& problem, int ahead)
      : problem_(problem), there_(must_be_there(problem, ahead)), slack_(problem.uses.size(), problem.budget) {
    plan_.keeps.assign(problem.uses.size(), false);
    for (size_t t = 0; t < there_.size(); ++t)
      for (const int group : there_[t]) slack_[t] -= bytes_of(group);
    find_intervals();
  }

  /// Negative if what must be there does not fit.
  int64_t least_slack() const {
    return slack_.empty() ? problem_.budget : *std::min_element(slack_.begin(), slack_.end());
  }

  ResidencyPlan solve(int64_t search_limit) {
    int64_t bound_saved = 0;
    if (least_slack() >= 0) {
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
    plan_.missing_bytes = std::max<int64_t>(0, -least_slack());
    plan_.peak_bytes = problem_.budget - least_slack();
    count_gathers();
    plan_.bound = plan_.gathered_bytes - bound_saved;
    return std::move(plan_);
  }

 private:
  int64_t bytes_of(int group) const { return problem_.bytes[static_cast<size_t>(group)]; }

  void find_intervals() {
    std::vector<size_t> last(problem_.bytes.size(), kNever);
    for (size_t t = 0; t < problem_.uses.size(); ++t) {
      const int group = problem_.uses[t];
      auto& before = last[static_cast<size_t>(group)];
      if (before != kNever) add_interval(before, t, group);
      before = t;
    }
    // Told to stay and not used in backward (a first layer's weight): it stays until its gradient is there.
    for (size_t group = 0; group < last.size(); ++group)
      if (problem_.rules[group] == KeepRule::kKept && last[group] < problem_.forward_uses)
        keep(interval_of(last[group], problem_.uses.size(), static_cast<int>(group)));
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
    const auto rule = crosses ? problem_.rules[static_cast<size_t>(group)] : KeepRule::kPlanned;
    if (rule == KeepRule::kKept || interval.costs.empty())
      keep(interval);
    else if (rule == KeepRule::kPlanned)
      candidates_.push_back(std::move(interval));
  }

  void keep(const Interval& interval) {
    plan_.keeps[interval.use] = true;
    for (const size_t t : interval.costs) slack_[t] -= interval.bytes;
  }

  void count_gathers() {
    std::vector<bool> is_there(problem_.bytes.size(), false);
    for (size_t t = 0; t < problem_.uses.size(); ++t) {
      const auto group = static_cast<size_t>(problem_.uses[t]);
      if (!is_there[group]) {
        plan_.gathered_bytes += problem_.bytes[group];
        ++plan_.all_gathers;
      }
      is_there[group] = plan_.keeps[t];
    }
  }

  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  const ResidencyProblem& problem_;
  std::vector<std::vector<int>> there_;
  std::vector<int64_t> slack_;
  std::vector<Interval> candidates_;
  ResidencyPlan plan_;
};

}  // namespace

ResidencyPlan plan_residency(const ResidencyProblem& problem, int64_t search_limit) {
  Planner planner(problem, problem.prefetch_distance);
  if (planner.least_slack() >= 0 || problem.prefetch_distance == 0) return planner.solve(search_limit);
  auto plan = Planner(problem, /*ahead=*/0).solve(search_limit);
  plan.prefetch_fits = false;
  return plan;
}

}  // namespace fsdp
