#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// The life of a step: forward, backward, and the finalization that may follow on its own.
namespace fsdp {

enum class StepState : uint8_t {
  kIdle,
  kForward,
  kBackward,
  kDue,          ///< a backward has ended that is not finalized (set_manual_backward_finalization)
  kDueForward,   ///< the next micro-batch's forward, with such a one behind it
  kDueBackward,
  kFinalizing,   ///< finalized, and nobody has waited for the gradients
};
inline constexpr size_t kStepStateCount = 7;

enum class StepEvent : uint8_t {
  kForwardBegins,
  kBackwardBegins,  ///< of a retained graph too, without a forward; or inside another backward
  kStepEnds,        ///< a forward without a backward, or a backward
  kIsLeftDue,       ///< a backward has ended, and is to be finalized
  kFinalize,
  kWaitedFor,       ///< the gradients of a finalization
  kGivenUp,
};
inline constexpr size_t kStepEventCount = 7;

/// The state that follows; or why the event is an error in this state.
struct StepTransition {
  StepState next = StepState::kIdle;
  const char* error = nullptr;
};

namespace detail {

using enum StepState;

constexpr StepTransition go(StepState next) { return {.next = next}; }
constexpr StepTransition refuse(const char* error) { return {.error = error}; }

inline constexpr auto kInside = refuse("a forward of this module cannot begin inside a step");
inline constexpr auto kNothingEnds = refuse("no step of this module is under way that could end");
inline constexpr auto kNotWaitedFor = refuse(
    "finalize_backward_async: its gradients were not waited for, so no forward, backward or scope of this module can begin; "
    "call wait() on what it returned");
inline constexpr auto kFinalizedTwice = refuse(
    "finalize_backward: the gradients of the last call were not waited for; call wait() on what finalize_backward_async "
    "returned");
inline constexpr auto kBeforeBackward =
    refuse("finalize_backward: cannot be called between a forward and its backward; call it after backward()");
inline constexpr auto kInBackward =
    refuse("finalize_backward: cannot be called inside a backward; call it after backward() has returned (after an exception, "
           "call reset_iter_state() first)");
inline constexpr auto kDropped = refuse(
    "GradientReductionHandle: reset_iter_state has dropped the gradients that it was to wait for; run the step again");

// clang-format off
inline constexpr std::array<std::array<StepTransition, kStepEventCount>, kStepStateCount> kStepTable = {{
  //                kForwardBegins   kBackwardBegins   kStepEnds        kIsLeftDue    kFinalize         kWaitedFor  kGivenUp
  /*kIdle*/        {go(kForward),    go(kBackward),    kNothingEnds,    kNothingEnds, go(kFinalizing),  kDropped,   go(kIdle)},
  /*kForward*/     {kInside,         go(kBackward),    go(kIdle),       kNothingEnds, kBeforeBackward,  kDropped,   go(kIdle)},
  /*kBackward*/    {kInside,         go(kBackward),    go(kIdle),       go(kDue),     kInBackward,      kDropped,   go(kIdle)},
  /*kDue*/         {go(kDueForward), go(kDueBackward), kNothingEnds,    kNothingEnds, go(kFinalizing),  kDropped,   go(kIdle)},
  /*kDueForward*/  {kInside,         go(kDueBackward), go(kDue),        kNothingEnds, kBeforeBackward,  kDropped,   go(kIdle)},
  /*kDueBackward*/ {kInside,         go(kDueBackward), go(kDue),        go(kDue),     kInBackward,      kDropped,   go(kIdle)},
  /*kFinalizing*/  {kNotWaitedFor,   kNotWaitedFor,    kNothingEnds,    kNothingEnds, kFinalizedTwice,  go(kIdle),  go(kIdle)},
}};
// clang-format on

}  // namespace detail

constexpr StepTransition transition(StepState state, StepEvent event) {
  return detail::kStepTable[static_cast<size_t>(state)][static_cast<size_t>(event)];
}

constexpr bool is_forward(StepState state) { return state == StepState::kForward || state == StepState::kDueForward; }
constexpr bool is_backward(StepState state) {
  return state == StepState::kBackward || state == StepState::kDueBackward;
}
constexpr bool in_step(StepState state) { return is_forward(state) || is_backward(state); }

}  // namespace fsdp
