// The scheduler by itself, without tensors: what it wants done in a step, and what holds for any groups, options and uses.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fsdp/error.hpp"
#include "schedule/schedule_executor.hpp"
#include "support/sample.hpp"

namespace fsdp::test {
namespace {

/// A chain of modules below a root, each with a group of so many bytes.
void add_chain(Executor& executor, const std::vector<int64_t>& bytes) {
  for (int i = 0; i < static_cast<int>(bytes.size()); ++i)
    executor.add({.name = "chain." + std::to_string(i),
                  .unsharded_bytes = bytes[static_cast<size_t>(i)],
                  .tree = {.enter = 1 + i, .exit = 2 + i},
                  .is_after_forward_unset = true});
}

void gradient(Executor& executor, int group) {
  executor.apply(executor.scheduler.on(GroupEvent::kLastGradient, group));
  executor.reduce(group);
}

void forward(Executor& executor, const std::vector<Ids>& uses) {
  executor.apply(executor.scheduler.release_between_steps());
  executor.scheduler.plan();
  executor.scheduler.begin_forward(/*records_autograd=*/true);
  for (const auto& used : uses) executor.use(used);
}

void end_backward(Executor& executor) {
  executor.scheduler.end_pass();
  executor.apply(executor.scheduler.end_step(Scheduler::StepEnd::kBackward));
}

/// A step of groups 0 and 1 as far as 1's last gradient, behind an operator of backward that reads `used`. Returns what was done
/// at that gradient.
std::string step_to_last_gradient(Executor& executor, const Ids& used) {
  auto& scheduler = executor.scheduler;
  scheduler.begin_forward(true);
  for (const int group : {0, 1}) executor.use({group});
  scheduler.begin_backward(true);
  executor.use(used);
  const auto done = executor.apply(scheduler.on(GroupEvent::kLastGradient, 1));
  executor.apply(scheduler.on(GroupEvent::kReduced, 1));
  return done;
}

void backward(Executor& executor, const std::vector<Ids>& uses) {
  executor.scheduler.begin_backward(/*is_of_forward=*/true);
  for (size_t i = 0; i < uses.size(); ++i) {
    executor.use(uses[i]);
    for (const int group : uses[i]) {
      const bool is_last = std::none_of(uses.begin() + static_cast<std::ptrdiff_t>(i) + 1, uses.end(),
                                        [&](const Ids& later) { return contains(later, group); });
      if (is_last) gradient(executor, group);
    }
  }
  end_backward(executor);
}

std::vector<Ids> reversed(std::vector<Ids> uses) {
  std::reverse(uses.begin(), uses.end());
  return uses;
}

std::vector<Ids> one_by_one(const Ids& groups) {
  std::vector<Ids> uses;
  for (const int group : groups) uses.push_back({group});
  return uses;
}

}  // namespace

TEST_CASE("with a communicator of its own a reduction is packed behind the gather in its group's room", "[group][scheduler]") {
  for (const auto start : kReduceScatterStarts) {
    CAPTURE(name_of(start));
    Executor executor;
    for (int i = 0; i < 3; ++i)
      executor.add({.unsharded_bytes = 10, .tree = {.enter = 1 + i, .exit = 2 + i}, .reduce = {.is_apart = true}});
    auto& scheduler = executor.scheduler;
    scheduler.options().reduce_scatter_start = start;
    std::string reduced;
    for (int step = 0; step < 2; ++step) {
      forward(executor, one_by_one({0, 1, 2}));
      scheduler.begin_backward(/*is_of_forward=*/true);
      for (const int group : {2, 1, 0}) {
        executor.use({group});
        executor.apply(scheduler.on(GroupEvent::kLastGradient, group));
        const auto done = executor.reduce(group);
        if (group == 2) reduced = done;
      }
      executor.started += static_cast<int>(scheduler.reduce_order().all());
      end_backward(executor);
    }
    const bool is_held = start == ReduceScatterStart::kFirstAfterAllGather;
    const bool waits = start == ReduceScatterStart::kFirstAfterNextBackward;
    CHECK(reduced == std::string("unshard 0, pack 2; ") + (waits ? "" : is_held ? "start behind 0" : "start"));
  }
}

TEST_CASE("a step in actions: when used at first, ahead of use when the order is known", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10, 10});
  auto& scheduler = executor.scheduler;

  scheduler.begin_forward(true);
  CHECK(executor.use({0}) == "unshard 0, wait 0");
  CHECK(executor.use({1}) == "release 0, unshard 1, wait 1");
  CHECK(executor.use({2}) == "release 1, unshard 2, wait 2");
  CHECK(scheduler.begin_backward(true).empty());
  CHECK(executor.use({2}).empty());
  CHECK(executor.apply(scheduler.on(GroupEvent::kLastGradient, 2)) == "reshard 2");
  CHECK(executor.use({1}) == "unshard 1, wait 1");
  CHECK(executor.use({0}) == "reshard 1, unshard 0, wait 0");
  scheduler.end_pass();
  CHECK(executor.apply(scheduler.end_step(Scheduler::StepEnd::kBackward)) == "reshard 0");

  scheduler.begin_forward(true);
  CHECK(executor.use({0}) == "unshard 0, wait 0, unshard 1");
  CHECK(executor.use({1}) == "release 0, wait 1, unshard 2");
  CHECK(executor.use({2}) == "release 1, wait 2");
  scheduler.begin_backward(true);
  CHECK(executor.use({2}) == "unshard 1");
  CHECK(executor.apply(scheduler.on(GroupEvent::kLastGradient, 2)) == "reshard 2");
  CHECK(executor.reduce(2) == "pack 2; unshard 0, start");
  CHECK(executor.use({1}) == "wait 1");
}

TEST_CASE("what is read again behind its last gradient stays there for that once a step has shown it", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10});
  const auto step = [&] {
    const auto released = step_to_last_gradient(executor, {1});
    const auto again = executor.use({1});
    executor.use({0});
    end_backward(executor);
    return released + "; " + again;
  };
  CHECK(step() == "reshard 1; unshard 1, wait 1");
  CHECK(step() == "; ");
  CHECK(step() == "; ");
}

TEST_CASE("what an operator reads again of the last one's groups is no use in the order, released or not", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10});
  const auto step = [&] {
    const auto released = step_to_last_gradient(executor, {1, 0});
    // Nobody asks where both are still here.
    const auto again = released.empty() ? std::string() : executor.use({0, 1});
    end_backward(executor);
    CHECK(executor.scheduler.orders().backward().learned() == Ids{1, 0});
    return released + "; " + again;
  };
  CHECK(step() == "reshard 1; unshard 1, wait 1");
  for (int i = 0; i < 3; ++i) CHECK(step() == "; ");
}

TEST_CASE("what is written in a forward is gathered again", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10});
  executor.scheduler.begin_forward(true);
  executor.use({0});
  CHECK(executor.use({0}, {0}) == "reshard 0, unshard 0, wait 0");
}

TEST_CASE("without anything ahead, backward first frees what reductions keep", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10});
  executor.scheduler.options().prefetch_distance = 0;
  forward(executor, {{0}, {1}});
  executor.scheduler.begin_backward(true);
  CHECK(executor.use({1}) == "free");
  CHECK(executor.use({0}) == "reshard 1, free, unshard 0, wait 0");
}

TEST_CASE("a list says what is gathered with a use, in place of the order", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10, 10});
  auto facts = executor.scheduler.groups()[0].facts;
  facts.has_forward_list = true;
  executor.scheduler.groups().set_facts(0, facts);
  for (int step = 0; step < 2; ++step) {
    CAPTURE(step);
    executor.scheduler.begin_forward(true);
    CHECK(executor.use({0}) == "unshard 0, wait 0, listed 0");
    CHECK(executor.apply(executor.scheduler.on(GroupEvent::kListed, 2)) == "unshard 2");
    CHECK(executor.apply(executor.scheduler.on(GroupEvent::kListed, 2)).empty());
    CHECK(executor.use({1}) == "release 0, unshard 1, wait 1");
    CHECK(executor.use({2}) == "release 1, wait 2");
    executor.scheduler.end_pass();
    CHECK(executor.apply(executor.scheduler.end_step(Scheduler::StepEnd::kForward)) == "reshard 2");
  }
}

TEST_CASE("a hook's reads go with it, and a user's unshard stays", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10, 10});
  auto& scheduler = executor.scheduler;
  CHECK(executor.apply(scheduler.on(GroupEvent::kUserUnshards, 1)) == "unshard 1");
  CHECK(executor.apply(scheduler.on(GroupEvent::kUserWaits, 1)) == "wait 1");
  scheduler.begin_forward(true);
  executor.use({0});
  const auto before = scheduler.groups().held();
  CHECK(executor.apply(scheduler.read_beside(Ids{2}, {})) == "unshard 2, wait 2");
  CHECK(executor.apply(scheduler.end_user_hook(before)) == "reshard 2");
  CHECK(executor.is_held(1));
  CHECK(executor.apply(scheduler.on(GroupEvent::kUserReshards, 1)) == "reshard 1");
}

TEST_CASE("what an exception leaves is released, and nothing is learned of it", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10});
  forward(executor, {{0}, {1}});
  executor.apply(executor.scheduler.abandon());
  CHECK(executor.held_bytes() == 0);
  CHECK(executor.scheduler.orders().forward().learned().empty());
}

TEST_CASE("what an action could not do is told", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10});
  auto& groups = executor.scheduler.groups();
  executor.scheduler.begin_forward(true);
  executor.use({0});
  groups.set_residency(0, Residency::kReleased);
  CHECK(groups.held().empty());
  CHECK(groups.held_bytes() == 0);
  groups.set_residency(1, Residency::kUnsharding);
  CHECK(groups.held() == Ids{1});
  CHECK(groups.held_bytes() == 10);
}

TEST_CASE("a group's size may change while it is here, and it may go", "[group][scheduler]") {
  Executor executor;
  add_chain(executor, {10, 10});
  auto& groups = executor.scheduler.groups();
  executor.scheduler.begin_forward(true);
  executor.use({0});
  auto facts = groups[0].facts;
  facts.unsharded_bytes = 25;
  groups.set_facts(0, facts);
  CHECK(groups.held_bytes() == 25);
  executor.scheduler.remove(0);
  CHECK(groups.held_bytes() == 0);
  CHECK(groups.held().empty());
  CHECK(executor.scheduler.current().empty());
  Actions actions;
  groups.unshard(0, actions);
  CHECK(actions.empty());
}

namespace {

/// Some groups, options, and a few steps over them, with whatever users do in between.
struct Drawn {
  std::vector<GroupFacts> facts;
  Scheduler::Options options;
  std::vector<Ids> uses;
  bool has_user = false;  ///< who gathers, releases, writes and interrupts
  uint64_t seed = 0;
};

int below(std::mt19937_64& draw, int count) { return static_cast<int>(draw() % static_cast<uint64_t>(count)); }

/// Depth-first intervals of a random tree over `facts`.
void draw_tree(std::mt19937_64& draw, std::vector<GroupFacts>& facts) {
  std::vector<size_t> open;
  int next = 0;
  for (size_t i = 0; i < facts.size(); ++i) {
    while (!open.empty() && draw() % 2 == 0) {
      facts[open.back()].tree.exit = next;
      open.pop_back();
    }
    facts[i].tree.enter = next++;
    open.push_back(i);
  }
  for (; !open.empty(); open.pop_back()) facts[open.back()].tree.exit = next;
}

Drawn draw_schedule(uint64_t seed) {
  std::mt19937_64 draw(seed);
  Drawn drawn;
  drawn.seed = seed;
  drawn.has_user = draw() % 2 == 0;
  drawn.facts.resize(1 + draw() % 8);
  int64_t largest = 0, sum = 0;
  for (size_t i = 0; i < drawn.facts.size(); ++i) {
    auto& facts = drawn.facts[i];
    facts.name = "group " + std::to_string(i);
    facts.unsharded_bytes = 1 + below(draw, 20);
    facts.is_never_released = draw() % 8 == 0;
    facts.is_after_forward_unset = draw() % 3 != 0;
    facts.reshards_after_forward = facts.is_after_forward_unset || draw() % 3 != 0;
    facts.reshards_after_backward = draw() % 6 != 0;
    facts.stays_after_evaluation = draw() % 4 == 0;
    facts.prefetches_in_backward = draw() % 6 != 0;
    largest = std::max(largest, facts.unsharded_bytes);
    sum += facts.unsharded_bytes;
  }
  draw_tree(draw, drawn.facts);
  drawn.options.prefetch_distance = below(draw, 4);
  if (draw() % 2 == 0) drawn.options.unsharded_byte_budget = largest + below(draw, static_cast<int>(sum));
  const int uses = 1 + below(draw, 12);
  for (int i = 0; i < uses; ++i) {
    Ids used = {below(draw, static_cast<int>(drawn.facts.size()))};
    if (const int other = below(draw, 3 * static_cast<int>(drawn.facts.size()));
        other < static_cast<int>(drawn.facts.size()) && other != used[0])
      used.push_back(other);
    drawn.uses.push_back(std::move(used));
  }
  return drawn;
}

void interrupt(Executor& executor, std::mt19937_64& draw) {
  auto& scheduler = executor.scheduler;
  const int group = below(draw, executor.size());
  switch (draw() % 12) {
    case 0:
      executor.apply(scheduler.on(GroupEvent::kUserUnshards, group), {group});
      break;
    case 1:
      executor.apply(scheduler.on(GroupEvent::kUserWaits, group));
      break;
    case 2:
      executor.apply(scheduler.on(GroupEvent::kUserReshards, group));
      break;
    case 3:
      executor.apply(scheduler.on(GroupEvent::kUserLetsGo, group));
      break;
    case 4:
      executor.apply(scheduler.on(GroupEvent::kWritten, group));
      break;
    case 5:
      executor.apply(scheduler.on(GroupEvent::kListed, group), {group});
      break;
    case 6: {
      const auto before = scheduler.groups().held();
      executor.apply(scheduler.read_beside(Ids{group}, {}), {group});
      executor.apply(scheduler.end_user_hook(before));
      for (const int held : scheduler.groups().held()) CHECK(contains(before, held));
      break;
    }
    default:
      break;
  }
}

void run_step(Executor& executor, const Drawn& drawn, std::mt19937_64& draw) {
  auto& scheduler = executor.scheduler;
  executor.apply(scheduler.release_between_steps());
  scheduler.plan();
  const bool is_evaluation = drawn.has_user && draw() % 5 == 0;
  scheduler.begin_forward(!is_evaluation);
  const int forwards = drawn.has_user ? 1 + below(draw, 2) : 1;
  for (int i = 0; i < forwards; ++i)
    for (const auto& used : drawn.uses) {
      if (drawn.has_user) interrupt(executor, draw);
      if (drawn.has_user && draw() % 40 == 0) {
        executor.apply(scheduler.abandon());
        CHECK(executor.held_bytes() == 0);
        return;
      }
      executor.use(used, drawn.has_user && draw() % 6 == 0 ? used : Ids{});
    }
  if (!is_evaluation) {
    for (const int group : scheduler.begin_backward(true)) CHECK(scheduler.groups().is_held(group));
    const auto uses = reversed(drawn.uses);
    for (size_t i = 0; i < uses.size(); ++i) {
      if (drawn.has_user) interrupt(executor, draw);
      executor.use(uses[i]);
      for (const int group : uses[i]) {
        const bool is_last = std::none_of(uses.begin() + static_cast<std::ptrdiff_t>(i) + 1, uses.end(),
                                          [&](const Ids& later) { return contains(later, group); });
        if (is_last) gradient(executor, group);
      }
    }
  }
  scheduler.end_pass();
  executor.apply(
      scheduler.end_step(is_evaluation ? Scheduler::StepEnd::kForward : Scheduler::StepEnd::kBackward));
  CHECK(scheduler.current().empty());
  for (const int group : scheduler.groups().held()) {
    const auto& state = scheduler.groups()[group];
    CHECK((!state.facts.reshards_after_backward || state.holds.has(Hold::kAfterEvaluation)));
  }
}

/// Everything that was done.
std::vector<Action> run(const Drawn& drawn) {
  Executor executor;
  for (const auto& facts : drawn.facts) executor.add(facts);
  executor.scheduler.options() = drawn.options;
  std::mt19937_64 draw(drawn.seed + 1);
  for (int step = 0; step < 5; ++step) {
    try {
      run_step(executor, drawn, draw);
    } catch (const StateError& error) {
      // The budget has no room for what is to be kept.
      REQUIRE(drawn.options.unsharded_byte_budget.has_value());
      return executor.log;
    }
  }
  return executor.log;
}

}  // namespace

TEST_CASE("any schedule can be done, and comes out the same again", "[group][scheduler]") {
  Sample sample(1);
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    if (!sample.takes_next()) continue;
    CAPTURE(seed);
    const auto drawn = draw_schedule(seed);
    const auto first = run(drawn);
    const auto again = run(drawn);
    REQUIRE(text_of(first) == text_of(again));
  }
}

TEST_CASE("a steady step under a budget gathers what the plan says, and stays below it", "[group][scheduler]") {
  int planned = 0;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    CAPTURE(seed);
    auto drawn = draw_schedule(seed);
    drawn.has_user = false;
    for (auto& facts : drawn.facts) {
      facts.is_never_released = false;
      facts.is_after_forward_unset = facts.reshards_after_forward = facts.reshards_after_backward = true;
      facts.prefetches_in_backward = true;
    }
    if (!drawn.options.unsharded_byte_budget) continue;
    Executor executor;
    for (const auto& facts : drawn.facts) executor.add(facts);
    executor.scheduler.options() = drawn.options;
    std::mt19937_64 draw(seed);
    for (int step = 0; step < 2; ++step) run_step(executor, drawn, draw);
    try {
      executor.scheduler.plan();
    } catch (const StateError&) {
      continue;
    }
    if (!executor.scheduler.budget().has_plan() || !executor.scheduler.budget().plan().prefetch_fits) continue;
    ++planned;
    executor.peak = executor.gathered = 0;
    run_step(executor, drawn, draw);
    const auto bytes_of = [&](const Ids& used) {
      int64_t bytes = 0;
      for (const int group : used) bytes += drawn.facts[static_cast<size_t>(group)].unsharded_bytes;
      return bytes;
    };
    int64_t largest = 0;
    bool is_one_by_one = true;
    for (const auto& used : drawn.uses) {
      largest = std::max(largest, bytes_of(used));
      is_one_by_one &= used.size() == 1;
    }
    if (is_one_by_one) CHECK(executor.gathered <= executor.scheduler.budget().plan().gathered_bytes);
    CHECK(executor.peak <= std::max(largest, *drawn.options.unsharded_byte_budget));
  }
  CHECK(planned > 300);
}

namespace {

/// The fewest gathers with which each use finds its group, when so many groups fit.
int fewest_gathers(const Ids& uses, int groups, int fit) {
  std::map<unsigned, int> best = {{0U, 0}};
  for (const int group : uses) {
    std::map<unsigned, int> next;
    for (const auto& [held, gathers] : best) {
      const unsigned used = held | 1U << group;
      const int so_far = gathers + (used != held);
      for (unsigned kept = 0; kept < 1U << groups; ++kept) {
        if ((kept & ~used) != 0 || (kept >> group & 1U) == 0 || __builtin_popcount(kept) > fit) continue;
        const auto [known, is_new] = next.emplace(kept, so_far);
        if (!is_new) known->second = std::min(known->second, so_far);
      }
    }
    best = std::move(next);
  }
  int fewest = INT_MAX;
  for (const auto& [held, gathers] : best) fewest = std::min(fewest, gathers);
  return fewest;
}

}  // namespace

TEST_CASE("with nothing ahead a known order takes the fewest gathers that two groups' room allows", "[group][scheduler]") {
  std::mt19937_64 draw(1);
  for (int example = 0; example < 400; ++example) {
    CAPTURE(example);
    const int groups = 1 + below(draw, 6);
    Ids uses;
    for (int i = 1 + below(draw, 14); i > 0; --i) uses.push_back(below(draw, groups));
    Executor executor;
    add_chain(executor, std::vector<int64_t>(static_cast<size_t>(groups), 1));
    executor.scheduler.options().prefetch_distance = 0;
    for (int step = 0; step < 2; ++step) {
      executor.gathered = 0;
      forward(executor, one_by_one(uses));
      executor.scheduler.end_pass();
      executor.apply(executor.scheduler.end_step(Scheduler::StepEnd::kForward));
    }
    CHECK(executor.gathered == fewest_gathers(uses, groups, 2));
  }
}

TEST_CASE("so many groups are here as are used, gathered ahead, or in the room of one more", "[group][scheduler]") {
  std::mt19937_64 draw(2);
  for (int example = 0; example < 400; ++example) {
    CAPTURE(example);
    const int groups = 1 + below(draw, 8);
    Ids uses;
    for (int i = 1 + below(draw, 14); i > 0; --i) uses.push_back(below(draw, groups));
    Executor executor;
    add_chain(executor, std::vector<int64_t>(static_cast<size_t>(groups), 1));
    const int distance = below(draw, 4);
    executor.scheduler.options().prefetch_distance = distance;
    forward(executor, one_by_one(uses));
    backward(executor, reversed(one_by_one(uses)));
    executor.scheduler.begin_forward(true);
    for (const int group : uses) {
      executor.use({group});
      CHECK(executor.held_beside({group}) <= std::max(1, distance));
    }
  }
}

}  // namespace fsdp::test
