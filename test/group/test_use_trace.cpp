// The order in which passes use groups: learned, followed, left. Beside what a list of the uses says.
#include <catch2/catch.hpp>

#include <algorithm>
#include <functional>
#include <random>

#include "group/use_trace.hpp"

namespace fsdp::test {
namespace {

using Uses = std::vector<int>;
using Progress = UseTrace::Progress;

void run_pass(UseTrace& trace, const Uses& uses) {
  trace.begin_pass();
  for (const int group : uses) trace.use(group);
  trace.end_pass();
}

UseTrace learned_from(const Uses& uses) {
  UseTrace trace;
  run_pass(trace, uses);
  return trace;
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

/// What the trace answers behind `position` uses of a pass that goes as `uses` did.
void check_answers(const UseTrace& trace, const Uses& uses, size_t position) {
  REQUIRE(trace.follows());
  for (int group = 0; group <= kGroups; ++group) {  // one that is never used, too
    CHECK(trace.distance_to_next_use(group) == next_in(uses, position, group));
    CHECK(trace.last_use(group) == last_in(uses, position, group));
  }
  for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, uses.size()})
    CHECK(trace.upcoming(count) == upcoming_in(uses, position, count));
}

/// Of 200 random passes: each, and a trace that has learned it.
void for_learned_passes(const std::function<void(std::mt19937_64&, const Uses&, UseTrace&)>& check) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 draw(seed);
    const int groups = 3 + static_cast<int>(draw() % (kGroups - 2));
    const auto uses = random_uses(draw, groups, 2 + draw() % 12);
    auto trace = learned_from(uses);
    check(draw, uses, trace);
  }
}

}  // namespace

TEST_CASE("a pass that goes as the last one did is followed, and told what comes", "[use_trace]") {
  for_learned_passes([](std::mt19937_64&, const Uses& uses, UseTrace& trace) {
    REQUIRE(trace.learned() == uses);
    REQUIRE(trace.lessons() == 1);
    for (int pass = 0; pass < 2; ++pass) {
      trace.begin_pass();
      for (size_t position = 0; position < uses.size(); ++position) {
        check_answers(trace, uses, position);
        CHECK(trace.use(uses[position]) == Progress::kGoesOn);
        CHECK(trace.use(uses[position]) == Progress::kGoesOn);  // in a row: once
      }
      check_answers(trace, uses, uses.size());
      trace.end_pass();
      CHECK_FALSE(trace.follows());
      CHECK(trace.learned() == uses);
      CHECK(trace.lessons() == 1);
    }
  });
}

TEST_CASE("a pass that goes another way is not followed from there on, and learned", "[use_trace]") {
  for_learned_passes([](std::mt19937_64& draw, const Uses& uses, UseTrace& trace) {
    const size_t same = 1 + draw() % (uses.size() - 1);
    Uses other(uses.begin(), uses.begin() + static_cast<ptrdiff_t>(same));
    other.push_back(kGroups);  // not in the learned pass
    for (const int group : random_uses(draw, 4, 2)) other.push_back(group);
    trace.begin_pass();
    for (size_t position = 0; position < other.size(); ++position) {
      trace.use(other[position]);
      CHECK(trace.follows() == (position < same));
    }
    CHECK(trace.learned() == uses);  // until the pass is over
    trace.end_pass();
    CHECK(trace.learned() == other);
    CHECK(trace.lessons() == 2);
  });
}

TEST_CASE("a pass that ends early is learned, as one that never reaches the end would be", "[use_trace]") {
  auto trace = learned_from({0, 1, 2, 3});
  run_pass(trace, {0, 1});
  CHECK(trace.learned() == Uses{0, 1});
  CHECK(trace.lessons() == 2);
}

TEST_CASE("a pass without uses teaches nothing", "[use_trace]") {
  auto trace = learned_from({0, 1});
  run_pass(trace, {});
  CHECK(trace.learned() == Uses{0, 1});
  CHECK(trace.lessons() == 1);
}

TEST_CASE("a pass that starts over is followed from its beginning, and says so", "[use_trace]") {
  for_learned_passes([](std::mt19937_64&, const Uses& uses, UseTrace& trace) {
    trace.begin_pass();
    for (int round = 0; round < 3; ++round)
      for (size_t position = 0; position < uses.size(); ++position) {
        const bool starts_over = round > 0 && position == 0;
        CHECK(trace.use(uses[position]) == (starts_over ? Progress::kStartedOver : Progress::kGoesOn));
        check_answers(trace, uses, position + 1);
      }
    trace.end_pass();
    CHECK(trace.learned() == uses);
    CHECK(trace.lessons() == 1);
  });
}

TEST_CASE("a pass that is given up teaches nothing, whatever it had used", "[use_trace]") {
  auto trace = learned_from({0, 1, 2});
  for (const auto& uses : {Uses{0, 1, 2}, Uses{0, 2}, Uses{5}}) {
    trace.begin_pass();
    for (const int group : uses) trace.use(group);
    trace.abandon_pass();
    CHECK_FALSE(trace.follows());
    CHECK(trace.learned() == Uses{0, 1, 2});
    CHECK(trace.lessons() == 1);
  }
  trace.begin_pass();
  CHECK(trace.follows());
  CHECK(trace.upcoming(3) == Uses{0, 1, 2});
}

TEST_CASE("a pass that begins ends the one before it", "[use_trace]") {
  UseTrace trace;
  trace.begin_pass();
  trace.use(1);
  trace.use(0);
  trace.begin_pass();
  CHECK(trace.learned() == Uses{1, 0});
  CHECK(trace.follows());
}

TEST_CASE("uses outside a pass are nobody's", "[use_trace]") {
  auto trace = learned_from({0, 1});
  CHECK(trace.use(7) == Progress::kGoesOn);
  trace.end_pass();
  CHECK(trace.learned() == Uses{0, 1});
}

TEST_CASE("what is forgotten is learned anew", "[use_trace]") {
  auto trace = learned_from({0, 1});
  trace.clear();
  CHECK(trace.learned().empty());
  trace.begin_pass();
  CHECK_FALSE(trace.follows());
  trace.use(1);
  trace.end_pass();
  CHECK(trace.learned() == Uses{1});
  CHECK(trace.lessons() == 3);  // forgetting is a lesson: what was planned for the old order goes
}

TEST_CASE("a loop that never runs backward fills no memory, and leaves no order", "[use_trace]") {
  auto trace = learned_from({0, 1});
  trace.begin_pass();
  for (int i = 0; i < (1 << 20) + 2; ++i) trace.use(2 + i % 2);
  trace.end_pass();
  CHECK(trace.learned().empty());
  run_pass(trace, {3, 4});
  CHECK(trace.learned() == Uses{3, 4});
}

}  // namespace fsdp::test
