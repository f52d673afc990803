// Why a group stays where nothing uses it: what each hold keeps it through, and what ends it.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <set>
#include <vector>

#include "schedule/holds.hpp"

namespace fsdp::test {
namespace {

using enum Hold;
const std::set<Hold> kAll = {kByUser, kListed, kAheadOfBackward, kAfterEvaluation};

const std::map<HoldEvent, std::set<Hold>> kEnded = {
    {HoldEvent::kUsed, {kListed}},
    {HoldEvent::kForwardGoesOn, {kAheadOfBackward}},
    {HoldEvent::kBackwardBegins, {kAheadOfBackward}},
    {HoldEvent::kBackwardEnds, {kListed}},
    {HoldEvent::kStepEnds, kAll},
    {HoldEvent::kUserLetsGo, {kByUser}},
    {HoldEvent::kUserReshards, {kByUser, kListed, kAheadOfBackward}},
    {HoldEvent::kReleased, {kAfterEvaluation}},
};
const std::map<HoldSpan, std::set<Hold>> kKept = {
    {HoldSpan::kLastGradient, {kByUser}},
    {HoldSpan::kMakingRoom, {kByUser, kListed}},
    {HoldSpan::kRestOfPass, {kByUser, kListed, kAheadOfBackward}},
    {HoldSpan::kBetweenSteps, {kByUser, kListed, kAfterEvaluation}},
};

/// Every set of holds.
std::vector<std::set<Hold>> sets_of_holds() {
  std::vector<std::set<Hold>> sets = {{}};
  for (const Hold hold : kAll) {
    const auto before = sets;
    for (auto set : before) {
      set.insert(hold);
      sets.push_back(set);
    }
  }
  return sets;
}

Holds with(const std::set<Hold>& set) {
  Holds holds;
  for (const Hold hold : set) holds.add(hold);
  return holds;
}

bool meet(const std::set<Hold>& one, const std::set<Hold>& other) {
  return std::any_of(one.begin(), one.end(), [&](Hold hold) { return other.contains(hold); });
}

}  // namespace

TEST_CASE("each event ends its holds and no others", "[group][holds]") {
  REQUIRE(kAll.size() == kHoldCount);
  REQUIRE(kEnded.size() == kHoldEventCount);
  for (const auto& set : sets_of_holds())
    for (const auto& [event, ended] : kEnded) {
      CAPTURE(set.size(), static_cast<int>(event));
      auto holds = with(set);
      CHECK(holds.end(event) == meet(set, ended));
      for (const Hold hold : kAll) CHECK(holds.has(hold) == (set.contains(hold) && !ended.contains(hold)));
    }
}

TEST_CASE("a group is kept by any hold that reaches so far", "[group][holds]") {
  REQUIRE(kKept.size() == kHoldSpanCount);
  for (const auto& set : sets_of_holds())
    for (const auto& [span, kept] : kKept) CHECK(with(set).keep_through(span) == meet(set, kept));
}

TEST_CASE("what unshard() has asked for stays until reshard() or the end of the step", "[group][holds]") {
  for (const auto last : {HoldEvent::kUserReshards, HoldEvent::kUserLetsGo, HoldEvent::kStepEnds}) {
    auto holds = with({kByUser});
    for (const auto event : {HoldEvent::kUsed, HoldEvent::kReleased, HoldEvent::kForwardGoesOn, HoldEvent::kBackwardBegins,
                             HoldEvent::kBackwardEnds}) {
      CHECK_FALSE(holds.end(event));
      for (const auto& [span, kept] : kKept) CHECK(holds.keep_through(span));
    }
    CHECK(holds.end(last));
    for (const auto& [span, kept] : kKept) CHECK_FALSE(holds.keep_through(span));
  }
}

}  // namespace fsdp::test
