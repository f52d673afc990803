#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace fsdp {

/// Why a group stays unsharded that nothing uses at the moment.
enum class Hold : uint8_t {
  kByUser,           ///< unshard() was called
  kListed,           ///< gathered ahead because a prefetch list, perhaps another root's, said so; not used yet
  kAheadOfBackward,  ///< gathered at the end of a forward for the backward, which has not begun
  kAfterEvaluation,  ///< left there by a forward without a backward (ResidencyOptions::stays_after_evaluation)
};
inline constexpr size_t kHoldCount = 4;

/// What ends holds.
enum class HoldEvent : uint8_t {
  kUsed,            ///< an operator uses the group
  kForwardGoesOn,   ///< instead of a backward
  kBackwardBegins,
  kBackwardEnds,    ///< which was not the last one
  kStepEnds,        ///< or is given up
  kUserLetsGo,      ///< the forward that unshard() was for is over
  kUserReshards,
  kReleased,        ///< for whatever reason
};
inline constexpr size_t kHoldEventCount = 8;

/// What a hold keeps a group through.
enum class HoldSpan : uint8_t {
  kLastGradient,  ///< of the group, in backward
  kMakingRoom,    ///< for others, when a limit of groups or bytes is reached
  kRestOfPass,
  kBetweenSteps,  ///< and through reads there
};
inline constexpr size_t kHoldSpanCount = 4;

constexpr uint8_t hold_bits(std::same_as<Hold> auto... holds) {
  return static_cast<uint8_t>(((1U << static_cast<unsigned>(holds)) | ...));
}

/// The holds on one group.
class Holds {
 public:
  constexpr void add(Hold hold) { bits_ |= hold_bits(hold); }
  constexpr bool has(Hold hold) const { return (bits_ & hold_bits(hold)) != 0; }
  /// Ends what the event ends. Returns whether there was any of it.
  constexpr bool end(HoldEvent event) {
    const uint8_t ended = bits_ & kEnds[static_cast<size_t>(event)];
    bits_ &= static_cast<uint8_t>(~ended);
    return ended != 0;
  }
  constexpr bool keep_through(HoldSpan span) const { return (bits_ & kKeeps[static_cast<size_t>(span)]) != 0; }

 private:
  static constexpr std::array<uint8_t, kHoldEventCount> kEnds = {
      /*kUsed*/ hold_bits(Hold::kListed),
      /*kForwardGoesOn*/ hold_bits(Hold::kAheadOfBackward),
      /*kBackwardBegins*/ hold_bits(Hold::kAheadOfBackward),
      /*kBackwardEnds*/ hold_bits(Hold::kListed),
      /*kStepEnds*/ hold_bits(Hold::kByUser, Hold::kListed, Hold::kAheadOfBackward, Hold::kAfterEvaluation),
      /*kUserLetsGo*/ hold_bits(Hold::kByUser),
      /*kUserReshards*/ hold_bits(Hold::kByUser, Hold::kListed, Hold::kAheadOfBackward),
      /*kReleased*/ hold_bits(Hold::kAfterEvaluation),
  };
  static constexpr std::array<uint8_t, kHoldSpanCount> kKeeps = {
      /*kLastGradient*/ hold_bits(Hold::kByUser),
      /*kMakingRoom*/ hold_bits(Hold::kByUser, Hold::kListed),
      /*kRestOfPass*/ hold_bits(Hold::kByUser, Hold::kListed, Hold::kAheadOfBackward),
      /*kBetweenSteps*/ hold_bits(Hold::kByUser, Hold::kListed, Hold::kAfterEvaluation),
  };

  uint8_t bits_ = 0;
};

}  // namespace fsdp
