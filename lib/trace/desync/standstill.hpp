#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "trace/desync/host_activity.hpp"
#include "trace/desync/watch_times.hpp"

namespace fsdp {

/// How long the host has not moved, whether that is too long, and what has been done about it since it last moved. The
/// watching thread's own.
class Standstill {
 public:
  using Clock = std::chrono::steady_clock;

  Standstill(const WatchTimes& times, Clock::time_point now) : times_(times), since_(now) {}

  /// What the host does at `now`. Where it has moved, nothing has been done yet.
  void follow(HostActivity::Snapshot host, Clock::time_point now) {
    if (host.number != host_.number) *this = Standstill(times_, now);
    host_ = host;
    length_ = now - since_;
  }

  uint64_t number() const { return host_.number; }
  Clock::time_point since() const { return since_; }

  /// The ranks may disagree. A host that waits elsewhere (for a GPU, say) stands still in the middle of a step.
  bool is_suspicious() const {
    using Place = HostActivity::Whereabouts;
    return host_.place == Place::kInCollective ? length_ >= times_.compare_after
                                               : host_.place == Place::kInStep && length_ >= times_.late_after;
  }
  /// The collective that the host waits for is late.
  bool is_late() const {
    return host_.place == HostActivity::Whereabouts::kInCollective && length_ >= times_.late_after;
  }

  /// The others have been told where this rank is.
  bool is_posted() const { return is_posted_; }
  void note_posted() { is_posted_ = true; }
  /// Whoever reads this rank's log has been told that the collective is late.
  bool is_reported() const { return is_reported_; }
  void note_reported() { is_reported_ = true; }

  /// True if the others are to be asked this time: more and more seldom, as who comes later finds this rank's report at
  /// its own first look.
  bool is_look_due() {
    if (++looks_ < next_look_) return false;
    next_look_ += std::min(looks_, kLongestGap);
    return true;
  }

 private:
  static constexpr int kLongestGap = 16;

  WatchTimes times_;
  HostActivity::Snapshot host_ = {};
  Clock::time_point since_;
  Clock::duration length_{0};
  bool is_posted_ = false;
  bool is_reported_ = false;
  int looks_ = 0;
  int next_look_ = 1;
};

}  // namespace fsdp
