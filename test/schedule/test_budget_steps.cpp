// What a root's byte budget promises of any step, by the scheduler alone: it is kept, a plan says what is gathered, and a
// larger one never gathers more.
#include <catch2/catch.hpp>

#include <optional>
#include <random>

#include "fsdp/error.hpp"
#include "schedule/schedule_executor.hpp"
#include "support/sample.hpp"

namespace fsdp::test {
namespace {

/// A model and its steps, and how it is sharded.
struct DrawnSteps {
  std::vector<GroupFacts> facts;
  std::vector<Ids> forward, backward;  // operators
  std::vector<Ids> lists;              // by group: what a prefetch list names
  std::vector<size_t> gradient_after;  // by group: behind which operator of backward; none: never
  int prefetch_distance = 0;
};

class StepDraw {
 public:
  explicit StepDraw(uint64_t seed) : draw_(seed) {}

  int below(int count) { return static_cast<int>(draw_() % static_cast<uint64_t>(count)); }
  bool one_in(int count) { return below(count) == 0; }

  DrawnSteps steps() {
    DrawnSteps drawn;
    const int groups = 1 + below(7);
    const bool alike = one_in(3);
    for (int i = 0; i < groups; ++i) drawn.facts.push_back(facts(i, alike ? 10 : 1 + below(20)));
    for (int i = 1 + below(9); i > 0; --i) drawn.forward.push_back(operands(groups));
    for (size_t i = drawn.forward.size(); i-- > 0;) {
      if (one_in(8)) drawn.backward.push_back(operands(groups));  // computed again
      if (!one_in(6)) drawn.backward.push_back(drawn.forward[i]);
      if (one_in(6) && !drawn.backward.empty()) drawn.backward.push_back(drawn.backward.back());  // read once more
    }
    if (drawn.backward.empty()) drawn.backward.push_back(drawn.forward.back());
    drawn.lists.resize(static_cast<size_t>(groups));
    for (int i = 0; i < groups; ++i) {
      drawn.gradient_after.push_back(gradient_of(i, drawn.backward));
      if (one_in(8)) add_list(drawn, i);
    }
    drawn.prefetch_distance = below(4);
    return drawn;
  }

 private:
  GroupFacts facts(int i, int64_t bytes) {
    GroupFacts facts{.name = "group " + std::to_string(i),
                     .unsharded_bytes = bytes,
                     .is_never_released = one_in(10),
                     .tree = {.enter = i == 0 ? 0 : 2 * i, .exit = i == 0 ? 100 : 2 * i + 1}};
    facts.is_after_forward_unset = !one_in(3);
    facts.reshards_after_forward = !one_in(3);  // unset, too: a root's default
    facts.reshards_after_backward = !one_in(8);
    facts.stays_after_evaluation = one_in(4);
    facts.prefetches_in_backward = !one_in(6);
    return facts;
  }

  Ids operands(int groups) {
    Ids used = {below(groups)};
    if (const int other = below(groups); one_in(6) && other != used[0]) used.push_back(other);
    return used;
  }

  /// As a rule at once; later where others are computed first, before it is read for the last time where its gradient does not
  /// take that, and never if it is frozen.
  size_t gradient_of(int group, const std::vector<Ids>& backward) {
    size_t at = backward.size() - 1;
    const bool is_early = one_in(5);
    for (size_t i = backward.size(); i-- > 0;)
      if (contains(backward[i], group)) {
        at = i;
        if (!is_early) break;
      }
    if (one_in(8)) return backward.size();
    return one_in(3) ? at + static_cast<size_t>(below(static_cast<int>(backward.size() - at))) : at;
  }

  void add_list(DrawnSteps& drawn, int group) {
    for (int i = 1 + below(2); i > 0; --i)
      drawn.lists[static_cast<size_t>(group)].push_back(below(static_cast<int>(drawn.facts.size())));
    auto& facts = drawn.facts[static_cast<size_t>(group)];
    facts.has_forward_list = one_in(2);
    facts.has_backward_list = !facts.has_forward_list;
  }

  std::mt19937_64 draw_;
};

int64_t bytes_of(const DrawnSteps& drawn, const Ids& groups) {
  int64_t bytes = 0;
  for (const int group : groups) {
    const auto& facts = drawn.facts[static_cast<size_t>(group)];
    if (!facts.is_never_released) bytes += facts.unsharded_bytes;
  }
  return bytes;
}

/// Of one group; of the groups that one operator reads.
int64_t largest_of(const DrawnSteps& drawn, bool counts_together) {
  int64_t largest = 0;
  for (size_t i = 0; i < drawn.facts.size(); ++i) largest = std::max(largest, bytes_of(drawn, {static_cast<int>(i)}));
  if (!counts_together) return largest;
  for (const auto& uses : {drawn.forward, drawn.backward})
    for (const auto& used : uses) largest = std::max(largest, bytes_of(drawn, used));
  return largest;
}

int64_t bytes_of_all(const DrawnSteps& drawn) {
  Ids all;
  for (size_t i = 0; i < drawn.facts.size(); ++i) all.push_back(static_cast<int>(i));
  return bytes_of(drawn, all);
}

/// The steps of `drawn` under a budget.
class BudgetRun {
 public:
  Executor executor;

  BudgetRun(const DrawnSteps& drawn, int64_t budget) : drawn_(drawn) {
    for (const auto& facts : drawn.facts) executor.add(facts);
    scheduler().options() = {.prefetch_distance = drawn.prefetch_distance, .unsharded_byte_budget = budget};
  }

  Scheduler& scheduler() { return executor.scheduler; }

  /// Returns false if it is refused before it begins.
  bool step(int forwards = 1) {
    executor.apply(scheduler().release_between_steps());
    const auto held = scheduler().groups().held();
    try {
      scheduler().plan();
    } catch (const StateError&) {
      CHECK(scheduler().groups().held() == held);
      return false;
    }
    scheduler().begin_forward(/*records_autograd=*/true);
    for (int i = 0; i < forwards; ++i) run_forward();
    scheduler().begin_backward(/*is_of_forward=*/true);
    run_backward();
    scheduler().end_pass();
    executor.apply(scheduler().end_step(Scheduler::StepEnd::kBackward));
    return true;
  }

  void evaluate() {
    executor.apply(scheduler().release_between_steps());
    scheduler().begin_forward(/*records_autograd=*/false);
    run_forward();
    scheduler().end_pass();
    executor.apply(scheduler().end_step(Scheduler::StepEnd::kForward));
  }

  void backward_again() {
    executor.apply(scheduler().release_between_steps());
    scheduler().plan(StepEvent::kBackwardBegins);
    scheduler().begin_backward(/*is_of_forward=*/false);
    run_backward();
    scheduler().end_pass();
    executor.apply(scheduler().end_step(Scheduler::StepEnd::kBackward));
  }

  void read(int group) { executor.apply(scheduler().read(Ids{group}, {}), {group}); }
  void read_in_hook(int group) {
    const auto before = scheduler().groups().held();
    executor.apply(scheduler().read_beside(Ids{group}, {}), {group});
    executor.apply(scheduler().end_user_hook(before));
  }
  /// In each forward, behind its operators.
  std::optional<int> hook_reads;

 private:
  void run_forward() {
    for (const auto& used : drawn_.forward) {
      use(used);
      if (hook_reads) read_in_hook(*hook_reads);
    }
  }

  void run_backward() {
    for (size_t i = 0; i < drawn_.backward.size(); ++i) {
      use(drawn_.backward[i]);
      for (int group = 0; group < executor.size(); ++group) {
        if (drawn_.gradient_after[static_cast<size_t>(group)] != i) continue;
        executor.apply(scheduler().on(GroupEvent::kLastGradient, group));
        executor.reduce(group);
      }
    }
  }

  void use(const Ids& used) {
    const size_t done = executor.log.size();
    executor.use(used);
    const std::vector<Action> actions(executor.log.begin() + static_cast<std::ptrdiff_t>(done), executor.log.end());
    for (const auto& [kind, group] : actions)
      if (kind == ActionKind::kPrefetchListed)
        for (const int listed : drawn_.lists[static_cast<size_t>(group)])
          executor.apply(scheduler().on(GroupEvent::kListed, listed));
  }

  const DrawnSteps& drawn_;
};

struct Measured {
  int64_t gathered = 0, gathers = 0, peak = 0;
};

std::optional<Measured> steady_step(BudgetRun& run) {
  run.executor.peak = run.executor.gathered = 0;
  run.executor.log.clear();
  if (!run.step()) return std::nullopt;
  const auto gathers = std::ranges::count(run.executor.log, ActionKind::kUnshard, &Action::kind);
  return Measured{run.executor.gathered, gathers, run.executor.peak};
}

}  // namespace

TEST_CASE("a budget is kept in every step, evaluation, second forward or backward, read and hook, or the step is refused",
          "[group][scheduler][byte_budget]") {
  Sample sample(2);
  for (uint64_t seed = 1; seed <= 4000; ++seed) {
    if (!sample.takes_next()) continue;
    StepDraw draw(seed);
    const auto drawn = draw.steps();
    const int64_t budget = largest_of(drawn, false) + draw.below(static_cast<int>(bytes_of_all(drawn)) + 1);
    CAPTURE(seed, budget);
    BudgetRun run(drawn, budget);
    int64_t at_once = largest_of(drawn, true);
    for (int i = 0; i < 6; ++i) {
      const int group = draw.below(static_cast<int>(drawn.facts.size()));
      run.hook_reads = draw.one_in(6) ? std::optional(group) : std::nullopt;
      if (run.hook_reads)  // what the hook's operator reads stays beside it
        for (const auto& used : drawn.forward) at_once = std::max(at_once, bytes_of(drawn, used) + bytes_of(drawn, {group}));
      const bool goes_on = run.step(1 + draw.one_in(5));
      if (draw.one_in(4)) run.evaluate();
      if (draw.one_in(6)) run.read(group);
      if (goes_on && draw.one_in(6)) run.backward_again();
    }
    REQUIRE(run.executor.peak <= std::max(budget, at_once));
  }
}

TEST_CASE("under any budget a step gathers what its plan says, and never more under a larger one",
          "[group][scheduler][byte_budget]") {
  Sample sample(2);
  int planned = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    if (!sample.takes_next()) continue;
    const auto drawn = StepDraw(seed).steps();
    std::optional<int64_t> before;
    const int64_t most = largest_of(drawn, false) + bytes_of_all(drawn);
    for (int64_t budget = largest_of(drawn, false); budget <= most; budget += 1 + most / 40) {
      CAPTURE(seed, budget);
      BudgetRun run(drawn, budget);
      for (int step = 0; step < 2; ++step) run.step();
      const auto measured = steady_step(run);
      if (!measured) {
        REQUIRE_FALSE(before);  // nor is a larger one refused
        continue;
      }
      ++planned;
      const auto& plan = run.scheduler().budget().plan();
      REQUIRE(measured->gathered == plan.gathered_bytes);
      REQUIRE(measured->gathers == plan.all_gathers);
      REQUIRE(measured->peak <= std::max(budget, largest_of(drawn, true)));
      REQUIRE(measured->gathered <= before.value_or(INT64_MAX));
      before = measured->gathered;
    }
  }
  CHECK(planned > 3000);
}

}  // namespace fsdp::test
