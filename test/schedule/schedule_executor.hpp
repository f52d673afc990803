#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <string>
#include <vector>

#include "schedule/scheduler.hpp"

namespace fsdp::test {

using Ids = std::vector<int>;

template <class List>
std::string text_of(const List& actions) {
  using enum ActionKind;
  static const std::map<ActionKind, std::string> names = {
      {kUnshard, "unshard"},       {kWaitForUnshard, "wait"},       {kReshard, "reshard"},
      {kReshardAfterForward, "release"}, {kPrefetchListed, "listed"}, {kFreeReductionInputs, "free"},
      {kPack, "pack"},             {kStartReduction, "start"},      {kStartBehindGather, "start behind"}};
  std::string text;
  for (const auto& [kind, group] : actions) {
    if (!text.empty()) text += ", ";
    text += names.at(kind);
    if (group != -1) text += " " + std::to_string(group);
  }
  return text;
}

/// Does what the scheduler wants, and checks that it can be done: a group is gathered when it is released, waited for when
/// its gather is under way, and what one rank keeps for ever is not gathered. And that the scheduler knows where it is then.
class Executor {
 public:
  Scheduler scheduler;
  std::vector<Action> log;
  int64_t peak = 0, gathered = 0;
  int packed = 0, started = 0;  ///< reductions

  int add(GroupFacts facts) {
    always_.push_back(facts.is_never_released);
    bytes_.push_back(facts.unsharded_bytes);
    residency_.push_back(Residency::kReleased);
    return scheduler.groups().add(std::move(facts));
  }

  std::string apply(const Actions& actions, const Ids& used = {}) {
    for (const auto& action : actions) apply(action, used);
    log.insert(log.end(), actions.begin(), actions.end());
    for (int group = 0; group < size(); ++group)
      CHECK(scheduler.groups()[group].residency ==
            (always_[index(group)] ? Residency::kUnsharded : residency_[index(group)]));
    return text_of(actions);
  }

  /// One operator.
  std::string use(const Ids& used, const Ids& written = {}) {
    auto text = apply(scheduler.use(used, written), used);
    for (const int group : used)
      CHECK((always_[index(group)] || residency_[index(group)] == Residency::kUnsharded));
    return text;
  }

  /// The group's gradients are complete. What is done until they are packed, and behind that.
  std::string reduce(int group) {
    const auto before = apply(scheduler.on(GroupEvent::kComplete, group));
    return before + "; " + apply(scheduler.on(GroupEvent::kPacked, group));
  }

  int size() const { return static_cast<int>(bytes_.size()); }
  bool is_held(int group) const { return residency_[index(group)] != Residency::kReleased; }
  int64_t held_bytes() const {
    int64_t bytes = 0;
    for (int group = 0; group < size(); ++group) bytes += is_held(group) ? bytes_[index(group)] : 0;
    return bytes;
  }
  int held_beside(const Ids& used) const {
    int held = 0;
    for (int group = 0; group < size(); ++group) held += is_held(group) && !contains(used, group);
    return held;
  }

 private:
  static size_t index(int group) { return static_cast<size_t>(group); }

  void apply(const Action& action, const Ids& used) {
    using enum ActionKind;
    packed += action.kind == kPack;
    started += action.kind == kStartReduction || action.kind == kStartBehindGather;
    CHECK(started <= packed);
    if (action.kind == kFreeReductionInputs || action.kind == kStartReduction) {
      CHECK(action.group == -1);
      return;
    }
    REQUIRE(action.group >= 0);
    REQUIRE(action.group < size());
    auto& residency = residency_[index(action.group)];
    switch (action.kind) {
      case kUnshard:
        CHECK_FALSE(always_[index(action.group)]);
        CHECK(residency == Residency::kReleased);
        residency = Residency::kUnsharding;
        gathered += bytes_[index(action.group)];
        break;
      case kWaitForUnshard:
        CHECK(residency == Residency::kUnsharding);
        residency = Residency::kUnsharded;
        break;
      case kReshardAfterForward:
        CHECK(residency != Residency::kReleased);
        residency = Residency::kReleased;
        break;
      case kReshard:  // of a released group, too: it may have kept a piece after forward
        residency = Residency::kReleased;
        break;
      default:
        break;
    }
    // What is gathered ahead is within the budget; what is used has to be there.
    const auto& budget = scheduler.options().unsharded_byte_budget;
    if (action.kind == kUnshard && budget && !contains(used, action.group)) CHECK(held_bytes() <= *budget);
    peak = std::max(peak, held_bytes());
  }

  std::vector<bool> always_;
  std::vector<int64_t> bytes_;
  std::vector<Residency> residency_;
};

}  // namespace fsdp::test
