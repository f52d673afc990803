// The stages of a reduction, each cell of their table against the facts that a stage stands for.
#include <catch2/catch.hpp>
#include <optional>
#include <string>

#include "group/reduce/reduce_stage.hpp"

namespace fsdp::test {
namespace {

using enum ReduceStage;
using enum ReduceEvent;

/// What is so in a stage.
struct StageFacts {
  bool is_started = false;
  bool is_summed = false;    ///< over the ranks that shard
  bool is_kept = false;      ///< for a later backward
  bool is_assigned = false;
  bool operator==(const StageFacts&) const = default;
};

StageFacts facts_of(ReduceStage stage) {
  switch (stage) {
    case kPacked:
      return {};
    case kReduceScattering:
      return {.is_started = true};
    case kReduceScattered:
      return {.is_started = true, .is_summed = true};
    case kPartial:
      return {.is_started = true, .is_summed = true, .is_kept = true};
    case kAssigned:
      return {.is_started = true, .is_summed = true, .is_assigned = true};
  }
  return {};
}

/// What an event makes of them; nullopt: it is an error. Everything happens once, and in this order.
std::optional<StageFacts> after(StageFacts facts, ReduceEvent event) {
  switch (event) {
    case kStart:
      if (facts.is_started) return std::nullopt;
      facts.is_started = true;
      return facts;
    case kAllReduce:
    case kStorePartialSums:
      if (!facts.is_started || facts.is_summed) return std::nullopt;
      facts.is_summed = true;
      facts.is_kept = event == kStorePartialSums;
      return facts;
    case kAssign:
      if (!facts.is_summed || facts.is_kept || facts.is_assigned) return std::nullopt;
      facts.is_assigned = true;
      return facts;
  }
  return std::nullopt;
}

}  // namespace

TEST_CASE("each event leads from each stage of a reduction to where the facts say, or is an error with a text",
          "[group][reduce_stage]") {
  for (size_t s = 0; s < kReduceStageCount; ++s)
    for (size_t e = 0; e < kReduceEventCount; ++e) {
      CAPTURE(s, e);
      const auto stage = static_cast<ReduceStage>(s);
      const auto event = static_cast<ReduceEvent>(e);
      const auto [next, error] = transition(stage, event);
      const auto expected = after(facts_of(stage), event);
      REQUIRE((error == nullptr) == expected.has_value());
      if (expected)
        CHECK(facts_of(next) == *expected);
      else
        CHECK(!std::string(error).empty());
    }
}

}  // namespace fsdp::test
