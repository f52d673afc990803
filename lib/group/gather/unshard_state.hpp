#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// How a group's parameters go from sharded to unsharded and back.
namespace fsdp {

enum class UnshardState : uint8_t {
  kSharded,
  kUnsharding,             ///< their all-gather is under way
  kUnsharded,
  kShardedPostForward,     ///< released after forward, with a piece kept for a gather over fewer ranks
  kUnshardingPostForward,  ///< that gather is under way, and the piece is still here
  kAliased,                ///< one rank, nothing cast: the unsharded parameters are this rank's memory, for ever
  kMeta,                   ///< no values
};
inline constexpr size_t kUnshardStateCount = 7;

enum class UnshardEvent : uint8_t {
  kUnshard,
  kWaitForUnshard,
  kReshard,
  kReshardPostForward,  ///< as kReshard, but a piece of unsharded parameters is kept, or stays
  kDropPiece,           ///< the shards have been written since, or the forward that it was kept for is over
  kGatherFails,
};
inline constexpr size_t kUnshardEventCount = 6;

/// The state that follows; or why the event is an error in this state, to go behind the group's name.
struct UnshardTransition {
  UnshardState next = UnshardState::kSharded;
  const char* error = nullptr;
};

namespace detail {

constexpr UnshardTransition to(UnshardState next) { return {.next = next}; }
constexpr UnshardTransition forbidden(const char* error) { return {.error = error}; }

using enum UnshardState;
inline constexpr auto kNotStarted = forbidden("wait_for_unshard without unshard");
inline constexpr auto kNoValues = forbidden(
    "its parameters are on the meta device and have no values to gather; call fsdp::materialize on the module before "
    "using it");
inline constexpr auto kNoGather = forbidden("a gather has failed that was not under way");

inline constexpr auto kToSharded = to(kSharded), kToUnsharding = to(kUnsharding), kToUnsharded = to(kUnsharded),
                      kToPost = to(kShardedPostForward), kToUnshardingPost = to(kUnshardingPostForward),
                      kStaysAliased = to(kAliased), kStaysMeta = to(kMeta);

// clang-format off
inline constexpr std::array<std::array<UnshardTransition, kUnshardEventCount>, kUnshardStateCount> kUnshardTable = {{
  //                         kUnshard           kWaitForUnshard kReshard       kReshardPostForward kDropPiece     kGatherFails
  /*kSharded*/               {kToUnsharding,     kNotStarted,    kToSharded,    kToSharded,         kToSharded,    kNoGather},
  /*kUnsharding*/            {kToUnsharding,     kToUnsharded,   kToSharded,    kToSharded,         kToUnsharding, kToSharded},
  /*kUnsharded*/             {kToUnsharded,      kToUnsharded,   kToSharded,    kToPost,            kToUnsharded,  kNoGather},
  /*kShardedPostForward*/    {kToUnshardingPost, kNotStarted,    kToSharded,    kToPost,            kToSharded,    kNoGather},
  /*kUnshardingPostForward*/ {kToUnshardingPost, kToUnsharded,   kToSharded,    kToPost,            kToUnsharding, kToPost},
  /*kAliased*/               {kStaysAliased,     kStaysAliased,  kStaysAliased, kStaysAliased,      kStaysAliased, kNoGather},
  /*kMeta*/                  {kNoValues,         kNoValues,      kStaysMeta,    kStaysMeta,         kStaysMeta,    kNoGather},
}};
// clang-format on

}  // namespace detail

constexpr UnshardTransition transition(UnshardState state, UnshardEvent event) {
  return detail::kUnshardTable[static_cast<size_t>(state)][static_cast<size_t>(event)];
}

/// Operators can read the parameters.
constexpr bool is_unsharded(UnshardState state) {
  return state == UnshardState::kUnsharded || state == UnshardState::kAliased;
}
constexpr bool is_unsharding(UnshardState state) {
  return state == UnshardState::kUnsharding || state == UnshardState::kUnshardingPostForward;
}
/// A piece for a gather over fewer ranks is here.
constexpr bool has_post_forward_piece(UnshardState state) {
  return state == UnshardState::kShardedPostForward || state == UnshardState::kUnshardingPostForward;
}
/// Unsharded memory is in use, or will be when a gather has arrived.
constexpr bool holds_unsharded(UnshardState state) { return is_unsharded(state) || is_unsharding(state); }

}  // namespace fsdp
