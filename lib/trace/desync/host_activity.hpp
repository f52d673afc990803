#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "comm/watch/rank_watch.hpp"
#include "comm/watch/whereabouts.hpp"
#include "trace/collective_log.hpp"
#include "trace/desync/desync_report.hpp"

namespace fsdp {

/// What the host is doing. The thread that trains writes it, in a few atomic stores; any thread reads it.
class HostActivity {
 public:
  /// watch: of the rank, which knows what the host awaits outside of this root's groups; null: nobody does.
  HostActivity(std::shared_ptr<const CollectiveLog> log, int rank, std::shared_ptr<const RankWatch> watch = nullptr)
      : log_(std::move(log)), rank_(rank), watch_(std::move(watch)) {}

  // --- the thread that trains
  /// The host is about to launch, or to wait for, a collective of the group; and it is not any more.
  void enter(Operation operation, int group) {
    waits_for_.store(static_cast<uint64_t>(operation) << 32 | static_cast<uint32_t>(group), std::memory_order_relaxed);
    number_.store((number_.load(std::memory_order_relaxed) + 1) | 1, std::memory_order_release);
  }
  void leave() {
    const uint64_t number = number_.load(std::memory_order_relaxed);
    number_.store(number + number % 2, std::memory_order_release);
  }
  void set_in_step(bool value) { in_step_.store(value, std::memory_order_relaxed); }
  /// A collective has failed: nothing follows.
  void set_failed() { has_failed_.store(true, std::memory_order_relaxed); }

  // --- any thread
  enum class Whereabouts { kOutside, kInStep, kInCollective };
  struct Snapshot {
    uint64_t number = 0;  ///< another one as soon as the host has entered or left a collective
    Whereabouts place = Whereabouts::kOutside;
  };
  Snapshot snapshot() const;
  /// Says what the host waits for: "all_gather of blocks.3"; "": it is in no collective of the root's groups.
  std::string waits_for() const;
  /// Says where in the program the thread is that made this; "": unknown. May wait for that thread.
  std::string whereabouts() const { return fsdp::whereabouts(thread_); }
  /// Returns what the other ranks are told.
  RankReport report() const;

 private:
  const std::shared_ptr<const CollectiveLog> log_;
  const int rank_;
  const std::shared_ptr<const RankWatch> watch_;
  const pthread_t thread_ = ::pthread_self();
  std::atomic<uint64_t> number_{0};  // odd: in a collective
  std::atomic<uint64_t> waits_for_{0};
  std::atomic<bool> in_step_{false};
  std::atomic<bool> has_failed_{false};
};

}  // namespace fsdp
