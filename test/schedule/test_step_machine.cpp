// The life of a step: each cell of its table against the facts that a state stands for, and tasks, scopes and pins.
#include <catch2/catch.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/error.hpp"
#include "schedule/step_machine.hpp"

namespace fsdp::test {
namespace {

using enum StepState;
using enum StepEvent;

enum class Pass { kNone, kForward, kBackward };

/// What is so in a state.
struct StepFacts {
  Pass pass = Pass::kNone;
  bool is_due = false;      ///< a backward waits for its finalization
  bool is_awaited = false;  ///< a finalization waits for somebody to wait for it
  bool operator==(const StepFacts&) const = default;
};

StepFacts facts_in(StepState state) {
  switch (state) {
    case kIdle:
      return {};
    case kForward:
      return {.pass = Pass::kForward};
    case kBackward:
      return {.pass = Pass::kBackward};
    case kDue:
      return {.is_due = true};
    case kDueForward:
      return {.pass = Pass::kForward, .is_due = true};
    case kDueBackward:
      return {.pass = Pass::kBackward, .is_due = true};
    case kFinalizing:
      return {.is_awaited = true};
  }
  return {};
}

/// What an event makes of them; nullopt: it is an error.
std::optional<StepFacts> after(StepFacts facts, StepEvent event) {
  switch (event) {
    case kForwardBegins:
      if (facts.is_awaited || facts.pass != Pass::kNone) return std::nullopt;
      facts.pass = Pass::kForward;
      return facts;
    case kBackwardBegins:
      if (facts.is_awaited) return std::nullopt;
      facts.pass = Pass::kBackward;
      return facts;
    case kStepEnds:
      if (facts.pass == Pass::kNone) return std::nullopt;
      facts.pass = Pass::kNone;
      return facts;
    case kIsLeftDue:
      if (facts.pass != Pass::kBackward) return std::nullopt;
      return StepFacts{.is_due = true};
    case kFinalize:
      if (facts.pass != Pass::kNone || facts.is_awaited) return std::nullopt;
      return StepFacts{.is_awaited = true};
    case kWaitedFor:
      if (!facts.is_awaited) return std::nullopt;
      return StepFacts{};
    case kGivenUp:
      return StepFacts{};
  }
  return std::nullopt;
}

}  // namespace

TEST_CASE("each event leads from each state of a step to where the facts say, or is an error with a text",
          "[step_machine]") {
  for (size_t s = 0; s < kStepStateCount; ++s)
    for (size_t e = 0; e < kStepEventCount; ++e) {
      CAPTURE(s, e);
      const auto state = static_cast<StepState>(s);
      const auto [next, error] = transition(state, static_cast<StepEvent>(e));
      const auto expected = after(facts_in(state), static_cast<StepEvent>(e));
      REQUIRE((error == nullptr) == expected.has_value());
      if (expected)
        CHECK(facts_in(next) == *expected);
      else
        CHECK(!std::string(error).empty());
      CHECK(is_forward(state) == (facts_in(state).pass == Pass::kForward));
      CHECK(is_backward(state) == (facts_in(state).pass == Pass::kBackward));
      for (size_t other = 0; other < s; ++other)
        CHECK_FALSE(facts_in(static_cast<StepState>(other)) == facts_in(state));
    }
}

TEST_CASE("an event that is an error in a state throws its text and changes nothing", "[step_machine]") {
  for (size_t e = 0; e < kStepEventCount; ++e) {
    CAPTURE(e);
    const auto event = static_cast<StepEvent>(e);
    StepMachine step;
    step.on(kForwardBegins);
    const char* error = transition(kForward, event).error;
    if (error == nullptr) {
      step.on(event);
      CHECK(step.state() == transition(kForward, event).next);
    } else {
      CHECK_THROWS_AS(step.check(event), StateError);
      CHECK_THROWS_WITH(step.on(event), error);
      CHECK(step.state() == kForward);
    }
  }
}

TEST_CASE("only where nothing is under way, left or open is a root quiescent", "[step_machine]") {
  StepMachine step;
  CHECK(step.is_quiescent());
  for (const auto event : {kForwardBegins, kBackwardBegins, kIsLeftDue, kForwardBegins, kBackwardBegins, kIsLeftDue, kFinalize}) {
    step.on(event);
    CHECK_FALSE(step.is_quiescent());
  }
  step.on(kWaitedFor);
  CHECK(step.is_quiescent());
  step.enter_scope();
  step.enter_scope();
  step.leave_scope();
  CHECK_FALSE(step.is_quiescent());
  step.leave_scope();
  CHECK(step.is_quiescent());
}

TEST_CASE("a task that ends takes with it those that have begun inside it", "[step_machine]") {
  using End = StepMachine::TaskEnd;
  StepMachine step;
  step.on(kBackwardBegins);
  for (const int64_t task : {7, 9, 8}) step.begin_task(task);
  CHECK(step.has_task(9));
  CHECK(step.end_task(9) == End::kNested);
  CHECK(step.task_count() == 1);
  CHECK(step.end_task(8) == End::kUnknown);
  CHECK_FALSE(step.has_task(-1));
  CHECK(step.end_task(7) == End::kOutermost);
  CHECK(step.task_count() == 0);
  step.begin_task(3);
  step.on(kGivenUp);
  CHECK(step.end_task(3) == End::kUnknown);
}

TEST_CASE("while a step is pinned none begins, and what is under way goes on", "[step_machine]") {
  StepMachine step;
  step.pin();
  step.pin();
  CHECK_THROWS_WITH(step.on(kForwardBegins), Catch::Contains("FullParameters"));
  step.unpin();
  CHECK_THROWS_AS(step.on(kBackwardBegins), StateError);
  step.unpin();
  step.on(kForwardBegins);
  step.pin();
  step.on(kStepEnds);
  CHECK(step.state() == kIdle);
}

TEST_CASE("what a forward records is forgotten when the next begins", "[step_machine]") {
  StepMachine step;
  step.on(kForwardBegins);
  CHECK_FALSE(step.records_autograd());
  step.note_autograd();
  CHECK(step.records_autograd());
  step.on(kBackwardBegins);
  CHECK(step.records_autograd());
  step.on(kStepEnds);
  step.on(kForwardBegins);
  CHECK_FALSE(step.records_autograd());
}

TEST_CASE("a finalization's ticket is good once, and until the gradients are dropped", "[step_machine]") {
  StepMachine step;
  CHECK_THROWS_AS(step.check_ticket(0), StateError);
  for (int64_t ticket = 1; ticket <= 3; ++ticket) {
    step.on(kFinalize);
    CHECK(step.ticket() == ticket);
    step.check_ticket(ticket);
    CHECK_THROWS_AS(step.check_ticket(ticket - 1), StateError);
    step.on(ticket == 2 ? kGivenUp : kWaitedFor);
    CHECK_THROWS_AS(step.check_ticket(ticket), StateError);
  }
}

TEST_CASE("backwards are finalized in another way from a time on at which none is under way or left",
          "[step_machine]") {
  StepMachine step;
  step.set_manual_finalization(true);
  CHECK(step.is_manual());
  step.on(kForwardBegins);
  step.set_manual_finalization(false);
  step.set_manual_finalization(true);
  for (const auto event : {kBackwardBegins, kIsLeftDue, kFinalize}) {
    step.on(event);
    step.set_manual_finalization(true);  // no change
    CHECK_THROWS_AS(step.set_manual_finalization(false), StateError);
    CHECK(step.is_manual());
  }
  step.on(kWaitedFor);
  step.begin_task(1);
  CHECK_THROWS_AS(step.set_manual_finalization(false), StateError);
  step.end_task(1);
  step.set_manual_finalization(false);
  CHECK_FALSE(step.is_manual());
}

}  // namespace fsdp::test
