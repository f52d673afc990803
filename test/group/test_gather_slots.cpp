#include <catch2/catch.hpp>

#include "group/gather/gather_slots.hpp"

namespace fsdp::test {

TEST_CASE("groups share a ring of slots in turn, each as large as its largest", "[group][gather_slots]") {
  const std::vector<SlotNeed> needs = {{10}, {20}, {30}, {5}, {7}};
  const auto two = plan_slots(needs, 2);
  CHECK(two.slots == std::vector<size_t>{0, 1, 0, 1, 0});
  CHECK(two.bytes == std::vector<int64_t>{30, 20});
  const auto three = plan_slots(needs, 3);
  CHECK(three.slots == std::vector<size_t>{0, 1, 2, 0, 1});
  CHECK(three.bytes == std::vector<int64_t>{10, 20, 30});
  CHECK(plan_slots(needs, 9).bytes == std::vector<int64_t>{10, 20, 30, 5, 7});
}

TEST_CASE("a group with a slot of its own takes no turn", "[group][gather_slots]") {
  const std::vector<SlotNeed> needs = {
      {.bytes = 100, .is_own = true}, {10}, {.bytes = 50, .is_own = true}, {20}, {30}, {40}};
  const auto plan = plan_slots(needs, 2);
  CHECK(plan.slots == std::vector<size_t>{0, 1, 2, 3, 1, 3});
  CHECK(plan.bytes == std::vector<int64_t>{100, 30, 50, 40});
  CHECK(plan_slots({}, 2).bytes.empty());
}

}  // namespace fsdp::test
