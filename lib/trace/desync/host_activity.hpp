#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "trace/collective_log.hpp"
#include "trace/desync/desync_report.hpp"

namespace fsdp {

/// What the host is doing. The thread that trains writes it, in a few atomic stores; any thread reads it.
class HostActivity {
 public:
  HostActivity(std::shared_ptr<const CollectiveLog> log, int rank) : log_(std::move(log)), rank_(rank) {}

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
  enum class Place { kOutside, kInStep, kInCollective };
  struct Snapshot {
    uint64_t number = 0;  ///< another one as soon as the host has entered or left a collective
    Place place = Place::kOutside;
  };
  Snapshot snapshot() const;
  /// What the other ranks are told.
  RankReport report() const;

 private:
  const std::shared_ptr<const CollectiveLog> log_;
  const int rank_;
  std::atomic<uint64_t> number_{0};  // odd: in a collective
  std::atomic<uint64_t> waits_for_{0};
  std::atomic<bool> in_step_{false};
  std::atomic<bool> has_failed_{false};
};

}  // namespace fsdp
