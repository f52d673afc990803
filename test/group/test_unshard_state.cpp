// The states between sharded and unsharded parameters, each cell of their table against the facts that a state stands for.
#include <catch2/catch.hpp>
#include <optional>
#include <string>

#include "group/gather/unshard_state.hpp"

namespace fsdp::test {
namespace {

using enum UnshardState;
using enum UnshardEvent;

/// What is so in a state, one bit a fact.
struct Facts {
  bool is_gathering = false;   ///< a collective is under way
  bool is_readable = false;    ///< operators can read the parameters
  bool has_piece = false;      ///< for a gather over fewer ranks
  bool is_released = true;     ///< this group is ever released: it has memory apart from its shards
  bool has_values = true;
  bool operator==(const Facts&) const = default;
};

Facts facts_of(UnshardState state) {
  switch (state) {
    case kSharded:
      return {};
    case kUnsharding:
      return {.is_gathering = true};
    case kUnsharded:
      return {.is_readable = true};
    case kShardedPostForward:
      return {.has_piece = true};
    case kUnshardingPostForward:
      return {.is_gathering = true, .has_piece = true};
    case kAliased:
      return {.is_readable = true, .is_released = false};
    case kMeta:
      return {.has_values = false};
  }
  return {};
}

/// What an event makes of them; nullopt: it is an error.
std::optional<Facts> after(Facts facts, UnshardEvent event) {
  const bool stays = !facts.is_released || !facts.has_values;
  switch (event) {
    case kUnshard:
      if (!facts.has_values) return std::nullopt;
      if (!facts.is_readable) facts.is_gathering = true;
      return facts;
    case kWaitForUnshard:
      if (!facts.is_gathering && !facts.is_readable) return std::nullopt;
      if (facts.is_gathering) facts.has_piece = false;  // what is gathered again comes from the shards
      facts.is_gathering = false;
      facts.is_readable = true;
      return facts;
    case kReshard:
      if (stays) return facts;
      return Facts{};
    case kReshardPostForward:
      if (stays) return facts;
      // A piece can only be cut from what is here whole.
      return Facts{.has_piece = facts.is_readable || facts.has_piece};
    case kDropPiece:
      facts.has_piece = false;
      return facts;
    case kGatherFails:
      if (!facts.is_gathering) return std::nullopt;
      facts.is_gathering = false;
      return facts;
  }
  return std::nullopt;
}

UnshardState state_at(size_t index) { return static_cast<UnshardState>(index); }
UnshardEvent event_at(size_t index) { return static_cast<UnshardEvent>(index); }

}  // namespace

TEST_CASE("each event leads from each state of a group to where the facts say, or is an error with a text",
          "[unshard_state]") {
  for (size_t s = 0; s < kUnshardStateCount; ++s)
    for (size_t e = 0; e < kUnshardEventCount; ++e) {
      CAPTURE(s, e);
      const auto [next, error] = transition(state_at(s), event_at(e));
      const auto expected = after(facts_of(state_at(s)), event_at(e));
      REQUIRE((error == nullptr) == expected.has_value());
      if (expected)
        CHECK(facts_of(next) == *expected);
      else
        CHECK(!std::string(error).empty());
    }
}

TEST_CASE("no two states of a group stand for the same facts, and the questions about a state are those facts",
          "[unshard_state]") {
  for (size_t s = 0; s < kUnshardStateCount; ++s) {
    CAPTURE(s);
    const auto facts = facts_of(state_at(s));
    for (size_t other = 0; other < s; ++other) CHECK_FALSE(facts_of(state_at(other)) == facts);
    CHECK(is_unsharded(state_at(s)) == facts.is_readable);
    CHECK(is_unsharding(state_at(s)) == facts.is_gathering);
    CHECK(has_post_forward_piece(state_at(s)) == facts.has_piece);
    CHECK(holds_unsharded(state_at(s)) == (facts.is_readable || facts.is_gathering));
  }
}

TEST_CASE("whatever has happened, a reshard leaves nothing unsharded of a group that is ever released",
          "[unshard_state]") {
  for (size_t s = 0; s < kUnshardStateCount; ++s) {
    const auto facts = facts_of(state_at(s));
    const auto [next, error] = transition(state_at(s), kReshard);
    CAPTURE(s);
    CHECK(error == nullptr);
    CHECK(next == (facts.is_released && facts.has_values ? kSharded : state_at(s)));
  }
}

}  // namespace fsdp::test
