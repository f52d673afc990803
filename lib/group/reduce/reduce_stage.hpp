#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// How far a reduction has come.
namespace fsdp {

enum class ReduceStage : uint8_t {
  kPacked,            ///< the gradients have been taken, and nothing is under way
  kReduceScattering,  ///< its reduce-scatters are under way
  kReduceScattered,   ///< their sums are there; where there are replicas, the all-reduces of them are under way
  kPartial,           ///< the sums wait for a later backward that all-reduces
  kAssigned,          ///< the result is in `.grad` of the sharded parameters
};
inline constexpr size_t kReduceStageCount = 5;

enum class ReduceEvent : uint8_t {
  kStart,
  kAllReduce,         ///< the reduce-scatters are done, and what follows them starts, if anything does
  kStorePartialSums,  ///< they are done, and their sums are kept
  kAssign,
};
inline constexpr size_t kReduceEventCount = 4;

/// The stage that follows; or why the event is an error in this one, to go behind the group's name.
struct ReduceTransition {
  ReduceStage next = ReduceStage::kPacked;
  const char* error = nullptr;
};

namespace detail {

constexpr ReduceTransition to(ReduceStage next) { return {.next = next}; }
constexpr ReduceTransition not_now(const char* error) { return {.error = error}; }

inline constexpr auto kNotYetStarted = not_now("its reduction has not been started");
inline constexpr auto kStarted = not_now("its reduction has been started already");
inline constexpr auto kNotYetSummed = not_now("the sums of its reduce-scatters are not there yet");
inline constexpr auto kSummed = not_now("the sums of its reduce-scatters have been taken already");
inline constexpr auto kLeft = not_now("its partial sums wait for a backward that all-reduces");
inline constexpr auto kDone = not_now("its gradients have been assigned already");

using enum ReduceStage;
// clang-format off
inline constexpr std::array<std::array<ReduceTransition, kReduceEventCount>, kReduceStageCount> kReduceTable = {{
  //                    kStart                 kAllReduce            kStorePartialSums  kAssign
  /*kPacked*/           {to(kReduceScattering), kNotYetStarted,       kNotYetStarted,    kNotYetStarted},
  /*kReduceScattering*/ {kStarted,              to(kReduceScattered), to(kPartial),      kNotYetSummed},
  /*kReduceScattered*/  {kStarted,              kSummed,              kSummed,           to(kAssigned)},
  /*kPartial*/          {kStarted,              kSummed,              kSummed,           kLeft},
  /*kAssigned*/         {kStarted,              kSummed,              kSummed,           kDone},
}};
// clang-format on

}  // namespace detail

constexpr ReduceTransition transition(ReduceStage stage, ReduceEvent event) {
  return detail::kReduceTable[static_cast<size_t>(stage)][static_cast<size_t>(event)];
}

}  // namespace fsdp
