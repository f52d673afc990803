// The order in which passes use groups: learned, followed, left. Beside what a list of the uses says.
#include <catch2/catch.hpp>

#include <algorithm>
#include <functional>
#include <random>

#include "schedule/exec_order.hpp"

namespace fsdp::test {
namespace {

using Uses = std::vector<int>;
using Progress = ExecOrder::Progress;

void run_pass(ExecOrder& order, const Uses& uses) {
  order.begin_pass();
  for (const int group : uses) order.use(group);
  order.end_pass();
}

ExecOrder learned_from(const Uses& uses) {
  ExecOrder order;
  run_pass(order, uses);
  return order;
}

constexpr int kGroups = 6;  // at most, so that none has this number

/// Of `groups`, 3 or more: none twice in a row, the last one not the first.
Uses random_uses(std::mt19937_64& draw, int groups, size_t count) {
  Uses uses;
  while (uses.size() < count) {
    const int group = static_cast<int>(draw() % static_cast<uint64_t>(groups));
    const bool is_end = uses.size() + 1 == count;
    if (uses.empty() || (group != uses.back() && !(is_end && group == uses.front()))) uses.push_back(group);
  }
  return uses;
}

std::optional<size_t> next_in(const Uses& uses, size_t from, int group) {
  const auto found = std::find(uses.begin() + static_cast<ptrdiff_t>(from), uses.end(), group);
  if (found == uses.end()) return std::nullopt;
  return static_cast<size_t>(found - uses.begin()) - from;
}

std::optional<size_t> last_in(const Uses& uses, size_t until, int group) {
  for (size_t i = until; i-- > 0;)
    if (uses[i] == group) return i;
  return std::nullopt;
}

Uses upcoming_in(const Uses& uses, size_t from, size_t count) {
  Uses groups;
  for (size_t i = from; i < uses.size() && groups.size() < count; ++i) {
    const bool is_present = from > 0 && uses[i] == uses[from - 1];
    if (!is_present && std::find(groups.begin(), groups.end(), uses[i]) == groups.end()) groups.push_back(uses[i]);
  }
  return groups;
}

/// What the order answers behind `position` uses of a pass that goes as `uses` did.
void check_answers(const ExecOrder& order, const Uses& uses, size_t position) {
  REQUIRE(order.follows());
  for (int group = 0; group <= kGroups; ++group) {  // one that is never used, too
    CHECK(order.distance_to_next_use(group) == next_in(uses, position, group));
    CHECK(order.last_use(group) == last_in(uses, position, group));
  }
  for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, uses.size()})
    CHECK(order.upcoming(count) == upcoming_in(uses, position, count));
}

/// Of 200 random passes: each, and an order that has learned it.
void for_learned_passes(const std::function<void(std::mt19937_64&, const Uses&, ExecOrder&)>& check) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 draw(seed);
    const int groups = 3 + static_cast<int>(draw() % (kGroups - 2));
    const auto uses = random_uses(draw, groups, 2 + draw() % 12);
    auto order = learned_from(uses);
    check(draw, uses, order);
  }
}

}  // namespace

TEST_CASE("a pass that goes as the last one did is followed, and told what comes", "[group][exec_order]") {
  for_learned_passes([](std::mt19937_64&, const Uses& uses, ExecOrder& order) {
    REQUIRE(order.learned() == uses);
    REQUIRE(order.generation() == 1);
    for (int pass = 0; pass < 2; ++pass) {
      order.begin_pass();
      for (size_t position = 0; position < uses.size(); ++position) {
        check_answers(order, uses, position);
        CHECK(order.use(uses[position]) == Progress::kGoesOn);
        CHECK(order.use(uses[position]) == Progress::kGoesOn);  // in a row: once
      }
      check_answers(order, uses, uses.size());
      order.end_pass();
      CHECK_FALSE(order.follows());
      CHECK(order.learned() == uses);
      CHECK(order.generation() == 1);
    }
  });
}

TEST_CASE("a pass that goes another way is not followed from there on, and learned", "[group][exec_order]") {
  for_learned_passes([](std::mt19937_64& draw, const Uses& uses, ExecOrder& order) {
    const size_t same = 1 + draw() % (uses.size() - 1);
    Uses other(uses.begin(), uses.begin() + static_cast<ptrdiff_t>(same));
    other.push_back(kGroups);  // not in the learned pass
    for (const int group : random_uses(draw, 4, 2)) other.push_back(group);
    order.begin_pass();
    for (size_t position = 0; position < other.size(); ++position) {
      order.use(other[position]);
      CHECK(order.follows() == (position < same));
    }
    CHECK(order.learned() == uses);  // until the pass is over
    order.end_pass();
    CHECK(order.learned() == other);
    CHECK(order.generation() == 2);
  });
}

TEST_CASE("a pass that ends early is learned, as one that never reaches the end would be", "[group][exec_order]") {
  auto order = learned_from({0, 1, 2, 3});
  run_pass(order, {0, 1});
  CHECK(order.learned() == Uses{0, 1});
  CHECK(order.generation() == 2);
}

TEST_CASE("a pass without uses teaches nothing", "[group][exec_order]") {
  auto order = learned_from({0, 1});
  run_pass(order, {});
  CHECK(order.learned() == Uses{0, 1});
  CHECK(order.generation() == 1);
}

TEST_CASE("a pass that starts over is followed from its beginning, and says so", "[group][exec_order]") {
  for_learned_passes([](std::mt19937_64&, const Uses& uses, ExecOrder& order) {
    order.begin_pass();
    for (int round = 0; round < 3; ++round)
      for (size_t position = 0; position < uses.size(); ++position) {
        const bool starts_over = round > 0 && position == 0;
        CHECK(order.use(uses[position]) == (starts_over ? Progress::kStartedOver : Progress::kGoesOn));
        check_answers(order, uses, position + 1);
      }
    order.end_pass();
    CHECK(order.learned() == uses);
    CHECK(order.generation() == 1);
  });
}

TEST_CASE("what operators read together is learned anew where that alone has changed", "[group][exec_order]") {
  auto order = learned_from({0, 1, 0});
  CHECK(order.learned_beside().empty());
  for (int pass = 0; pass < 2; ++pass) {
    order.begin_pass();
    order.use(0);
    order.use(1, std::vector{1, 0});
    order.use(0);
    order.end_pass();
    CHECK(order.learned() == Uses{0, 1, 0});
    CHECK((order.learned_beside() == std::vector<ExecOrder::Beside>{{.use = 1, .group = 0}}));
    CHECK(order.generation() == 2);
  }
}

TEST_CASE("a pass that is given up teaches nothing, whatever it had used", "[group][exec_order]") {
  auto order = learned_from({0, 1, 2});
  for (const auto& uses : {Uses{0, 1, 2}, Uses{0, 2}, Uses{5}}) {
    order.begin_pass();
    for (const int group : uses) order.use(group);
    order.abandon_pass();
    CHECK_FALSE(order.follows());
    CHECK(order.learned() == Uses{0, 1, 2});
    CHECK(order.generation() == 1);
  }
  order.begin_pass();
  CHECK(order.follows());
  CHECK(order.upcoming(3) == Uses{0, 1, 2});
}

TEST_CASE("a pass that begins ends the one before it", "[group][exec_order]") {
  ExecOrder order;
  order.begin_pass();
  order.use(1);
  order.use(0);
  order.begin_pass();
  CHECK(order.learned() == Uses{1, 0});
  CHECK(order.follows());
}

TEST_CASE("uses outside a pass are nobody's", "[group][exec_order]") {
  auto order = learned_from({0, 1});
  CHECK(order.use(7) == Progress::kGoesOn);
  order.end_pass();
  CHECK(order.learned() == Uses{0, 1});
}

TEST_CASE("what is forgotten is learned anew", "[group][exec_order]") {
  auto order = learned_from({0, 1});
  order.clear();
  CHECK(order.learned().empty());
  order.begin_pass();
  CHECK_FALSE(order.follows());
  order.use(1);
  order.end_pass();
  CHECK(order.learned() == Uses{1});
  CHECK(order.generation() == 3);  // forgetting is a lesson: what was planned for the old order goes
}

TEST_CASE("whether a pass starts over is said in front of the uses, too", "[group][exec_order]") {
  size_t overs = 0;
  for_learned_passes([&](std::mt19937_64& draw, const Uses& uses, ExecOrder& order) {
    const auto repeats = draw() % 4 == 0 ? ExecOrder::Repeats::kAnotherOrder : ExecOrder::Repeats::kAsLearned;
    order.begin_pass();
    for (size_t i = 0; i < 3 * uses.size(); ++i) {
      Uses operands = {uses[i % uses.size()]};
      if (draw() % 3 == 0) operands.push_back(uses[++i % uses.size()]);
      if (draw() % 24 == 0) operands.push_back(static_cast<int>(draw() % kGroups));
      const bool foretold = order.would_start_over(operands, repeats);
      bool has_started_over = false;
      for (const int group : operands) has_started_over |= order.use(group, operands, repeats) == Progress::kStartedOver;
      CHECK(foretold == has_started_over);
      overs += has_started_over;
    }
  });
  CHECK(overs > 50);
}

TEST_CASE("a loop that never runs backward fills no memory, and leaves no order", "[group][exec_order]") {
  auto order = learned_from({0, 1});
  order.begin_pass();
  for (int i = 0; i < (1 << 20) + 2; ++i) order.use(2 + i % 2);
  order.end_pass();
  CHECK(order.learned().empty());
  run_pass(order, {3, 4});
  CHECK(order.learned() == Uses{3, 4});
}

TEST_CASE("which groups one operator uses at once is learned with its uses", "[group][exec_order]") {
  ExecOrder order;
  const Uses both = {1, 2};
  const std::vector<ExecOrder::Beside> beside = {{.use = 1, .group = 2}, {.use = 2, .group = 1}};
  for (int pass = 0; pass < 2; ++pass) {
    order.begin_pass();
    order.use(0);
    for (const int group : both) order.use(group, both);
    order.use(3, Uses{3});
    order.end_pass();
    CHECK(order.learned() == Uses{0, 1, 2, 3});
    CHECK((order.learned_beside() == beside));
    CHECK(order.generation() == 1);
  }
  order.clear();
  CHECK(order.learned_beside().empty());
}

}  // namespace fsdp::test
