#include <catch2/catch.hpp>

#include "schedule/group_states.hpp"
#include "schedule/shows.hpp"

namespace fsdp::test {
namespace {

constexpr Shows kForms[] = {Shows::kSharded, Shows::kUnsharded, Shows::kPostForward};

TEST_CASE("modules show unsharded parameters from a forward, a backward or a user's wait on", "[schedule][shows]") {
  for (const auto event : {ShowsEvent::kForwardBegins, ShowsEvent::kBackwardReaches, ShowsEvent::kUserWaited})
    for (const auto now : kForms) CHECK(shows_behind(event, {.now = now}) == Shows::kUnsharded);
}

TEST_CASE("they show sharded ones behind a user's reshard, and what is given up", "[schedule][shows]") {
  for (const auto event : {ShowsEvent::kUserReshards, ShowsEvent::kGivenUp})
    for (const auto now : kForms)
      for (const bool is_inside : {false, true})
        CHECK(shows_behind(event, {.now = now, .is_inside = is_inside, .is_held = true, .is_kept = true}) == Shows::kSharded);
}

TEST_CASE("the last forward of a pass that releases shows what stays of them", "[schedule][shows]") {
  const PassFacts releases = {.now = Shows::kUnsharded, .pass_is_over = true, .reshards_after_forward = true};
  CHECK(shows_behind(ShowsEvent::kForwardEnds, releases) == Shows::kSharded);
  auto keeps = releases;
  keeps.keeps_post_forward_shard = true;
  CHECK(shows_behind(ShowsEvent::kForwardEnds, keeps) == Shows::kPostForward);

  auto goes_on = releases;
  goes_on.pass_is_over = false;
  CHECK(shows_behind(ShowsEvent::kForwardEnds, goes_on) == Shows::kUnsharded);
  auto keeps_all = releases;
  keeps_all.reshards_after_forward = false;
  CHECK(shows_behind(ShowsEvent::kForwardEnds, keeps_all) == Shows::kUnsharded);
  for (const auto now : {Shows::kSharded, Shows::kPostForward}) {  // a user has resharded within
    keeps.now = now;
    CHECK(shows_behind(ShowsEvent::kForwardEnds, keeps) == now);
  }
}

TEST_CASE("behind a step they show unsharded what stays, unless a forward is under way", "[schedule][shows]") {
  for (const auto now : kForms) {
    CHECK(shows_behind(ShowsEvent::kStepEnds, {.now = now, .is_kept = true}) == Shows::kUnsharded);
    CHECK(shows_behind(ShowsEvent::kStepEnds, {.now = now, .is_held = true}) == Shows::kSharded);
    CHECK(shows_behind(ShowsEvent::kStepEnds, {.now = now, .is_inside = true}) == now);
  }
}

TEST_CASE("a backward that the root did not see takes back what it showed", "[schedule][shows]") {
  CHECK(shows_behind(ShowsEvent::kBackwardIsOver, {.now = Shows::kUnsharded}) == Shows::kSharded);
  CHECK(shows_behind(ShowsEvent::kBackwardIsOver, {.now = Shows::kUnsharded, .is_inside = true}) == Shows::kUnsharded);
  CHECK(shows_behind(ShowsEvent::kBackwardIsOver, {.now = Shows::kUnsharded, .is_kept = true}) == Shows::kUnsharded);
}

TEST_CASE("a hook in backward sees sharded what has been released", "[schedule][shows]") {
  CHECK(shows_behind(ShowsEvent::kHookRuns, {.now = Shows::kUnsharded}) == Shows::kSharded);
  CHECK(shows_behind(ShowsEvent::kHookRuns, {.now = Shows::kUnsharded, .is_held = true}) == Shows::kUnsharded);
  CHECK(shows_behind(ShowsEvent::kHookRuns, {.now = Shows::kUnsharded, .is_inside = true}) == Shows::kUnsharded);
  CHECK(shows_behind(ShowsEvent::kHookRuns, {.now = Shows::kPostForward}) == Shows::kPostForward);
}

TEST_CASE("what users ask for is shown again, and nothing else", "[schedule][shows]") {
  for (const auto event : {ShowsEvent::kUserWaited, ShowsEvent::kUserReshards, ShowsEvent::kGivenUp})
    CHECK(is_asked_for(event));
  for (const auto event : {ShowsEvent::kForwardBegins, ShowsEvent::kForwardEnds, ShowsEvent::kBackwardReaches,
                           ShowsEvent::kBackwardIsOver, ShowsEvent::kStepEnds, ShowsEvent::kHookRuns})
    CHECK(!is_asked_for(event));
}

TEST_CASE("a group stays beyond a step by the user, behind an evaluation, or as backward releases nothing",
          "[schedule][shows]") {
  GroupStates groups;
  const int group = groups.add({.name = "a", .unsharded_bytes = 4, .reshards_after_backward = true});
  CHECK(!groups[group].is_kept());
  groups.set_residency(group, Residency::kUnsharded);
  CHECK(!groups[group].is_kept());
  for (const auto hold : {Hold::kByUser, Hold::kAfterEvaluation}) {
    groups[group].holds.add(hold);
    CHECK(groups[group].is_kept());
    groups[group].holds = {};
  }
  auto facts = groups[group].facts;
  facts.reshards_after_backward = false;
  groups.set_facts(group, facts);
  CHECK(groups[group].is_kept());
  groups.set_residency(group, Residency::kReleased);
  CHECK(!groups[group].is_kept());
}

}  // namespace
}  // namespace fsdp::test
