#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "trace/collective_log.hpp"
#include "trace/first_values.hpp"

namespace fsdp {

/// The life of a thread that is asked to return, and that may return by itself.
enum class WatchState : uint8_t { kRuns, kIsToEnd, kHasEnded };
inline constexpr size_t kWatchStateCount = 3;

enum class WatchEvent : uint8_t { kAsked, kReturned };
inline constexpr size_t kWatchEventCount = 2;

namespace detail {

using enum WatchState;

// clang-format off
inline constexpr std::array<std::array<WatchState, kWatchEventCount>, kWatchStateCount> kWatchTable = {{
  //             kAsked     kReturned
  /*kRuns*/     {kIsToEnd,  kHasEnded},
  /*kIsToEnd*/  {kIsToEnd,  kHasEnded},
  /*kHasEnded*/ {kHasEnded, kHasEnded},
}};
// clang-format on

}  // namespace detail

constexpr WatchState transition(WatchState state, WatchEvent event) {
  return detail::kWatchTable[static_cast<size_t>(state)][static_cast<size_t>(event)];
}

/// What the thread that trains hands to the one that watches, and the end of the latter. Thread-safe.
class WatchMailbox {
 public:
  // --- the thread that trains
  /// A step has ended there whose collectives are to be compared.
  void post_step(CollectiveLog::Position step);
  void post_beginnings(std::vector<Beginning> beginnings);
  /// Asks the watching thread to return. True if it has within `patience`.
  bool end(std::chrono::milliseconds patience);

  // --- the thread that watches
  /// Waits until there is something new, or for `pause`. False: it is to end.
  bool await(std::chrono::milliseconds pause);
  std::vector<CollectiveLog::Position> take_steps();
  std::vector<Beginning> take_beginnings();
  void note_returned();

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable gone_;
  WatchState state_ = WatchState::kRuns;
  std::vector<CollectiveLog::Position> steps_;
  std::vector<Beginning> beginnings_;
};

}  // namespace fsdp
