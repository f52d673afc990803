#pragma once

#include <cstdint>

namespace fsdp {

/// What modules' tables hold of the parameters of one call of fully_shard, where a module shows them in several forms.
enum class Shows : uint8_t {
  kSharded,
  kUnsharded,
  kPostForward,  ///< a larger shard, of fewer ranks: between a forward that releases and its backward
};

/// What happens to the modules of one call.
enum class ShowsEvent : uint8_t {
  kForwardBegins,
  kForwardEnds,
  kBackwardReaches,  ///< one of their outputs
  kBackwardIsOver,   ///< that has reached one
  kStepEnds,         ///< or a backward, or a scope, of their root, well or not
  kUserWaited,       ///< for `unshard`
  kUserReshards,
  kGivenUp,   ///< reset_iter_state
  kHookRuns,  ///< a user's, on a reduced gradient
};

/// What is known of them then.
struct PassFacts {
  Shows now = Shows::kSharded;
  bool is_inside = false;     ///< a forward of one of them is under way
  bool pass_is_over = false;  ///< the forward that ends was the last of the call's
  bool reshards_after_forward = false;
  bool keeps_post_forward_shard = false;
  bool is_held = false;  ///< one of their groups is
  bool is_kept = false;  ///< and is to stay beyond the step
};

/// The form in which they show from then on: FSDP2's where it has one (FSDPModule's hooks, unshard, reshard), and the sharded
/// one as soon as nobody may read the unsharded one.
constexpr Shows shows_behind(ShowsEvent event, const PassFacts& facts) {
  switch (event) {
    case ShowsEvent::kForwardBegins:
    case ShowsEvent::kBackwardReaches:
    case ShowsEvent::kUserWaited:
      return Shows::kUnsharded;
    case ShowsEvent::kForwardEnds:
      if (!facts.pass_is_over || !facts.reshards_after_forward || facts.now != Shows::kUnsharded) return facts.now;
      return facts.keeps_post_forward_shard ? Shows::kPostForward : Shows::kSharded;
    case ShowsEvent::kStepEnds:
      if (facts.is_inside) return facts.now;
      return facts.is_kept ? Shows::kUnsharded : Shows::kSharded;
    case ShowsEvent::kBackwardIsOver:
      return facts.is_inside || facts.is_kept ? facts.now : Shows::kSharded;
    case ShowsEvent::kHookRuns:
      return facts.now == Shows::kUnsharded && !facts.is_inside && !facts.is_held ? Shows::kSharded : facts.now;
    case ShowsEvent::kUserReshards:
    case ShowsEvent::kGivenUp:
      break;
  }
  return Shows::kSharded;
}

/// True for a user's own call, which is shown whatever is shown: others may have put something else there (functional_call).
constexpr bool is_asked_for(ShowsEvent event) {
  return event == ShowsEvent::kUserWaited || event == ShowsEvent::kUserReshards || event == ShowsEvent::kGivenUp;
}

}  // namespace fsdp
