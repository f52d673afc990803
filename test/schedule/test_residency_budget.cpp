// A root's byte budget: when there is a plan, for what it is, and when it is made anew.
#include <catch2/catch.hpp>
#include <random>

#include "fsdp/error.hpp"
#include "schedule/exec_order.hpp"
#include "schedule/residency_budget.hpp"

namespace fsdp::test {
namespace {

ExecOrder learned_order(const std::vector<int>& uses) {
  ExecOrder order;
  order.begin_pass();
  for (const int group : uses) order.use(group);
  order.end_pass();
  return order;
}

const std::vector<GroupFacts> kFacts = {{.name = "first", .unsharded_bytes = 10, .is_after_forward_unset = true},
                                         {.name = "second", .unsharded_bytes = 20, .is_after_forward_unset = true},
                                         {.name = "third", .unsharded_bytes = 30, .is_after_forward_unset = true}};
/// Of 60: one group may stay beside another in use.
const ResidencyBudget::Options kBudget = {.bytes = 50, .prefetch_distance = 0};

}  // namespace

TEST_CASE("a budget plans what has been learned of both passes", "[group][residency_budget]") {
  const auto forward = learned_order({0, 1, 2}), backward = learned_order({2, 1, 0});
  ResidencyBudget budget;
  budget.update({.bytes = std::nullopt}, forward, backward, kFacts);
  CHECK_FALSE(budget.has_plan());
  budget.update(kBudget, forward, ExecOrder(), kFacts);
  CHECK_FALSE(budget.has_plan());
  budget.update(kBudget, forward, backward, kFacts);
  REQUIRE(budget.has_plan());
  const auto expected = plan_residency(residency_problem(kBudget, forward, backward, kFacts));
  CHECK(budget.plan().keeps == expected.keeps);
  // The last one of forward is the first of backward; of the others the second fits beside it.
  CHECK(expected.keeps == std::vector<bool>{false, true, true, false, false, false});
  for (size_t use = 0; use < 3; ++use) {
    CHECK(budget.keeps_after_forward_use(use) == expected.keeps[use]);
    CHECK(budget.keeps_after_backward_use(use) == expected.keeps[3 + use]);
  }
}

TEST_CASE("a plan is current until options, an order or a group change", "[group][residency_budget]") {
  auto forward = learned_order({0, 1, 2}), backward = learned_order({2, 1, 0});
  ResidencyBudget budget;
  const auto is_current = [&](const ResidencyBudget::Options& options = kBudget) {
    return budget.is_current(options, forward, backward);
  };
  CHECK_FALSE(is_current());
  budget.update(kBudget, forward, backward, kFacts);
  CHECK(is_current());
  CHECK_FALSE(is_current({.bytes = 60, .prefetch_distance = 0}));
  CHECK_FALSE(is_current({.bytes = 50, .prefetch_distance = 1}));
  budget.invalidate();
  CHECK_FALSE(is_current());
  for (auto* order : {&forward, &backward}) {
    budget.update(kBudget, forward, backward, kFacts);
    CHECK(is_current());
    order->begin_pass();
    for (const int group : {0, 2, 1}) order->use(group);
    order->end_pass();
    CHECK_FALSE(is_current());
  }
}

TEST_CASE("a group that stays between steps takes its room for good", "[group][residency_budget]") {
  const auto forward = learned_order({0, 1, 2}), backward = learned_order({2, 1, 0});
  for (uint64_t seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    auto groups = kFacts;
    int64_t left = *kBudget.bytes;
    for (auto& group : groups) {
      group.unsharded_bytes = static_cast<int64_t>(draw() % 20);
      group.reshards_after_backward = draw() % 2 == 0;
      group.is_after_forward_unset = draw() % 2 == 0;
      group.reshards_after_forward = draw() % 2 == 0;
      group.is_never_released = draw() % 4 == 0;
      if (!group.reshards_after_backward && !group.is_never_released) left -= group.unsharded_bytes;
    }
    const auto problem = residency_problem(kBudget, forward, backward, groups);
    CHECK(problem.uses == std::vector<int>{0, 1, 2, 2, 1, 0});
    CHECK(problem.forward_uses == 3);
    CHECK(problem.budget == left);
    for (size_t i = 0; i < groups.size(); ++i) {
      const auto& group = groups[i];
      const bool comes_and_goes = group.reshards_after_backward && !group.is_never_released;
      CHECK(problem.bytes[i] == (comes_and_goes ? group.unsharded_bytes : 0));
      CHECK((problem.rules[i] == KeepRule::kPlanned) == group.is_after_forward_unset);
      if (!group.is_after_forward_unset)
        CHECK(problem.rules[i] == (group.reshards_after_forward ? KeepRule::kReleased : KeepRule::kKept));
    }
  }
}

TEST_CASE("a budget that is too small names what is kept whatever it is, every time", "[group][residency_budget]") {
  const auto forward = learned_order({0, 1, 2}), backward = learned_order({2, 1, 0});
  auto groups = kFacts;
  groups[1].is_after_forward_unset = groups[1].reshards_after_forward = false;
  ResidencyBudget budget;
  const ResidencyBudget::Options options = {.bytes = 40, .prefetch_distance = 0};
  for (int step = 0; step < 2; ++step) {
    REQUIRE_FALSE(budget.is_current(options, forward, backward));
    CHECK_THROWS_WITH(budget.update(options, forward, backward, groups),
                      Catch::Contains("40 bytes are 10 too few") && Catch::Contains("'second' (20 bytes)") &&
                          Catch::Contains("when 'third' (30 bytes) is used") && !Catch::Contains("first"));
    CHECK_THROWS_AS(budget.update(options, forward, backward, groups), StateError);
    CHECK_FALSE(budget.has_plan());
  }
  CHECK(budget.try_update(options, forward, backward, groups).has_value());
  groups[1].is_after_forward_unset = true;
  groups[1].reshards_after_backward = false;
  CHECK_THROWS_WITH(budget.update(options, forward, backward, groups),
                    Catch::Contains("reshard_after_backward = false ('second' (20 bytes))"));
  groups[1].reshards_after_backward = true;
  CHECK_FALSE(budget.try_update(options, forward, backward, groups).has_value());
  CHECK(budget.has_plan());
}

}  // namespace fsdp::test
