#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>

#include "trace/desync/desync_board.hpp"
#include "trace/desync/desync_inquiry.hpp"
#include "trace/desync/host_activity.hpp"
#include "trace/desync/standstill.hpp"

namespace fsdp {

/// Looks after a host that does not move: tells the other ranks and asks them, and warns when a collective is late.
/// Throws what the board throws.
///
/// has_warned: any thread. The others: the watching thread.
class LateCheck {
 public:
  /// activity, board, inquiry: outlive this.
  LateCheck(const WatchTimes& times, const HostActivity& activity, DesyncBoard& board, DesyncInquiry& inquiry)
      : activity_(activity), board_(board), inquiry_(inquiry), standstill_(times, Standstill::Clock::now()) {}

  void follow(Standstill::Clock::time_point now) { standstill_.follow(activity_.snapshot(), now); }
  /// The ranks may disagree, by how long the host has not moved.
  bool is_suspicious() const { return standstill_.is_suspicious(); }
  bool is_late() const { return standstill_.is_late() && !standstill_.is_reported(); }

  /// Posts this rank's report, once, and asks some peers for theirs.
  void ask();
  /// Says once for all ranks who is where, in the log and on the board.
  void warn();
  /// A collective was late here: what was said about it is on the board.
  bool has_warned() const { return has_warned_.load(std::memory_order_relaxed); }

 private:
  const HostActivity& activity_;
  DesyncBoard& board_;
  DesyncInquiry& inquiry_;
  Standstill standstill_;
  size_t next_peer_ = 0;
  std::atomic<bool> has_warned_{false};
};

}  // namespace fsdp
