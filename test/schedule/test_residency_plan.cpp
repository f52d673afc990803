#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <random>

#include "schedule/residency_plan.hpp"

namespace fsdp::test {
namespace {

ResidencyProblem problem_of(std::vector<int> forward, std::vector<int> backward, std::vector<int64_t> bytes,
                            int64_t budget, int ahead = 0) {
  ResidencyProblem problem{.uses = std::move(forward), .forward_uses = 0, .bytes = std::move(bytes), .rules = {},
                           .budget = budget, .prefetch_distance = ahead};
  problem.forward_uses = problem.uses.size();
  problem.uses.insert(problem.uses.end(), backward.begin(), backward.end());
  problem.rules.assign(problem.bytes.size(), KeepRule::kPlanned);
  return problem;
}

/// Layers 0..n-1 forward, then backward in the opposite order.
ResidencyProblem chain_problem(std::vector<int64_t> bytes, int64_t budget, int ahead) {
  std::vector<int> forward, backward;
  for (size_t i = 0; i < bytes.size(); ++i) forward.push_back(static_cast<int>(i));
  backward.assign(forward.rbegin(), forward.rend());
  return problem_of(forward, backward, std::move(bytes), budget, ahead);
}

struct Replay {
  int64_t gathered = 0, peak = 0;
};

/// Walks the uses as the scheduler would: gather what is not there, and what is ahead in the pass; release
/// what the plan does not keep.
Replay replay(const ResidencyProblem& problem, const std::vector<bool>& keeps, int ahead) {
  Replay result;
  std::map<int, bool> held;  // by group: whether its last use said to keep it
  for (size_t t = 0; t < problem.uses.size(); ++t) {
    const size_t end = t < problem.forward_uses ? problem.forward_uses : problem.uses.size();
    std::vector<int> wanted;
    for (size_t next = t; next < end && wanted.size() <= static_cast<size_t>(ahead); ++next)
      if (std::find(wanted.begin(), wanted.end(), problem.uses[next]) == wanted.end()) wanted.push_back(problem.uses[next]);
    std::erase_if(held, [&](const auto& entry) {
      return !entry.second && std::find(wanted.begin(), wanted.end(), entry.first) == wanted.end();
    });
    for (const int group : wanted)
      if (held.emplace(group, false).second) result.gathered += problem.bytes[group];
    held[problem.uses[t]] = keeps[t];
    int64_t bytes = 0;
    for (const auto& [group, is_kept] : held) bytes += problem.bytes[group];
    result.peak = std::max(result.peak, bytes);
  }
  return result;
}

bool may_keep(const ResidencyProblem& problem, size_t use) {
  const int group = problem.uses[use];
  for (size_t next = use + 1; next < problem.uses.size(); ++next) {
    if (problem.uses[next] != group) continue;
    const bool crosses = use < problem.forward_uses && next >= problem.forward_uses;
    return !crosses || problem.rules[group] != KeepRule::kReleased;
  }
  return false;
}

/// The fewest bytes over all choices that stay within the budget.
int64_t brute_force(const ResidencyProblem& problem) {
  std::vector<size_t> choices;
  for (size_t t = 0; t < problem.uses.size(); ++t)
    if (may_keep(problem, t)) choices.push_back(t);
  int64_t best = -1;
  for (uint64_t mask = 0; mask < uint64_t{1} << choices.size(); ++mask) {
    std::vector<bool> keeps(problem.uses.size(), false);
    for (size_t i = 0; i < choices.size(); ++i) keeps[choices[i]] = mask >> i & 1;
    const auto run = replay(problem, keeps, problem.prefetch_distance);
    if (run.peak <= problem.budget && (best < 0 || run.gathered < best)) best = run.gathered;
  }
  return best;
}

}  // namespace

TEST_CASE("with room for two of four equal layers, the last ones of forward stay", "[group][residency_plan]") {
  const auto plan = plan_residency(chain_problem({10, 10, 10, 10}, /*budget=*/20, /*ahead=*/0));
  CHECK(plan.keeps == std::vector<bool>{false, false, true, true, false, false, false, false});
  CHECK(plan.gathered_bytes == 60);
  CHECK(plan.is_optimal());
  CHECK(plan.peak_bytes == 20);
}

TEST_CASE("room for everything gathers everything once, room for one group gathers at every use",
          "[group][residency_plan]") {
  CHECK(plan_residency(chain_problem({5, 7, 3}, 15, 1)).gathered_bytes == 15);
  CHECK(plan_residency(chain_problem({5, 7, 3}, 7, 0)).gathered_bytes == 27);  // the last one has its uses in a row
}

TEST_CASE("on random small traces the plan gathers what the best of all plans does, within the budget",
          "[group][residency_plan]") {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    std::mt19937_64 engine(seed);
    auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); };
    const int groups = draw(1, 5);
    std::vector<int64_t> bytes;
    for (int i = 0; i < groups; ++i) bytes.push_back(draw(0, 3) ? draw(1, 30) : 10);
    auto draw_pass = [&] {
      std::vector<int> uses;
      for (int i = draw(1, 6); i > 0; --i)
        if (const int group = draw(0, groups - 1); uses.empty() || uses.back() != group) uses.push_back(group);
      return uses;
    };
    auto problem = problem_of(draw_pass(), draw_pass(), bytes, draw(1, 90), draw(0, 2));
    for (auto& rule : problem.rules) rule = draw(0, 4) ? KeepRule::kPlanned : KeepRule::kReleased;
    const auto plan = plan_residency(problem);
    auto planned = problem;
    if (!plan.prefetch_fits) {  // the best of the budgets that have no room ahead
      const auto least = replay(problem, std::vector<bool>(problem.uses.size(), false), problem.prefetch_distance).peak;
      planned.prefetch_distance = 0;
      planned.budget = std::min(problem.budget, least - 1);
    }
    const auto best = brute_force(planned);
    CAPTURE(seed, problem.uses, problem.bytes, problem.budget, problem.prefetch_distance);
    if (plan.missing_bytes > 0) {
      CHECK(best == -1);
      continue;
    }
    const auto run = replay(planned, plan.keeps, planned.prefetch_distance);
    CHECK(run.gathered == plan.gathered_bytes);
    CHECK(run.peak <= problem.budget);
    CHECK(plan.gathered_bytes == best);
    CHECK(plan.is_optimal());
    for (int more : {1, 3, 10, 30}) {
      auto larger = problem;
      larger.budget += more;
      CHECK(plan_residency(larger).gathered_bytes <= plan.gathered_bytes);
    }
  }
}

TEST_CASE("for equal sizes it is Belady's rule: a plan for a thousand groups is found and proved",
          "[group][residency_plan]") {
  const auto plan = plan_residency(chain_problem(std::vector<int64_t>(1000, 8), 8 * 300, 1));
  CHECK(plan.is_optimal());
  // In the middle of the step, 300 groups are there: 1,700 gathers for 2,000 uses.
  CHECK(plan.gathered_bytes == 8 * 1700);
}

TEST_CASE("64 groups of a model's few sizes are planned exactly for every budget", "[group][residency_plan]") {
  std::vector<int64_t> bytes(64, 14'155'776);
  bytes.front() = 77'194'752;
  bytes.back() = 77'197'824;
  for (size_t i = 3; i < 63; i += 4) bytes[i] = 56'623'104;  // every fourth a mixture of experts
  for (int64_t budget = 160'000'000; budget < 2'000'000'000; budget += 37'000'001) {
    const auto plan = plan_residency(chain_problem(bytes, budget, 1));
    CAPTURE(budget, plan.gathered_bytes, plan.bound);
    CHECK(plan.is_optimal());
    CHECK(plan.peak_bytes <= budget);
  }
}

TEST_CASE("a budget that what is kept on purpose exceeds says by how much", "[group][residency_plan]") {
  auto problem = chain_problem({10, 10, 10}, 25, 0);
  problem.rules[0] = problem.rules[1] = KeepRule::kKept;
  const auto plan = plan_residency(problem);
  CHECK(plan.missing_bytes == 5);
  problem.budget = 30;
  CHECK(plan_residency(problem).missing_bytes == 0);
  CHECK(plan_residency(problem).gathered_bytes == 30);
}

TEST_CASE("what one operator reads together is there whatever the budget, and nothing beside it that may go",
          "[group][residency_plan]") {
  auto problem = problem_of({0, 1, 2}, {2, 1, 0}, {10, 10, 10}, /*budget=*/12);
  problem.beside = {{.use = 0, .group = 1}, {.use = 1, .group = 0}};  // 0 and 1 at once
  const auto plan = plan_residency(problem);
  CHECK(plan.missing_bytes == 0);
  CHECK(plan.peak_bytes == 20);
  CHECK(plan.gathered_bytes == 50);  // the last group of forward is the first of backward
  problem.rules[2] = KeepRule::kKept;
  CHECK(plan_residency(problem).missing_bytes == 0);
  problem.rules[0] = KeepRule::kKept;  // beside the last group, which one operator does not read with it
  CHECK(plan_residency(problem).missing_bytes == 8);
}

TEST_CASE("what is told to stay stays within a pass, too, until its last use in backward", "[group][residency_plan]") {
  auto problem = problem_of({0, 1, 0}, {1, 0, 1, 2}, {10, 10, 25}, /*budget=*/25);
  problem.rules[0] = problem.rules[1] = KeepRule::kKept;
  const auto plan = plan_residency(problem);
  CHECK(plan.missing_bytes == 0);  // both have gone when the last group is used
  CHECK(plan.gathered_bytes == 45);
}

TEST_CASE("a group of no bytes counts as a gather, one that is never released does not", "[group][residency_plan]") {
  auto problem = problem_of({0, 1, 2}, {2, 1, 0}, {10, 0, 0}, /*budget=*/20);
  problem.is_never_released = {false, false, true};
  const auto plan = plan_residency(problem);
  CHECK(plan.all_gathers == 2);
  CHECK(plan.gathered_bytes == 10);
}

TEST_CASE("where there is no room ahead, the plan says so and does without", "[group][residency_plan]") {
  const auto plan = plan_residency(chain_problem({10, 10, 10}, 10, 1));
  CHECK_FALSE(plan.prefetch_fits);
  CHECK(plan.missing_bytes == 0);
  CHECK(plan.gathered_bytes == 50);
}

TEST_CASE("a search that is cut short tells the bound it has", "[group][residency_plan]") {
  std::vector<int64_t> bytes;
  for (int64_t i = 0; i < 40; ++i) bytes.push_back(1'000'003 + 7919 * i * i);
  const auto plan = plan_residency(chain_problem(bytes, 100'000'001, 0), /*search_limit=*/50);
  CHECK(plan.bound <= plan.gathered_bytes);
  CHECK(plan.peak_bytes <= 100'000'001);
}

}  // namespace fsdp::test
