#pragma once

#include <chrono>
#include <string>

#include "trace/desync/desync_board.hpp"
#include "trace/desync/desync_inquiry.hpp"
#include "trace/desync/host_activity.hpp"

namespace fsdp {

/// Looks every now and then whether another rank has raised the alarm, and then says where this one is. The watching
/// thread's own. Throws what the board throws.
class AlarmPoll {
 public:
  using Clock = std::chrono::steady_clock;

  /// activity, board, inquiry: outlive this.
  AlarmPoll(std::chrono::milliseconds interval, const HostActivity& activity, DesyncBoard& board, DesyncInquiry& inquiry)
      : interval_(interval), activity_(activity), board_(board), inquiry_(inquiry) {}

  /// Asks the board if it is time.
  void look(Clock::time_point now);

 private:
  const std::chrono::milliseconds interval_;
  const HostActivity& activity_;
  DesyncBoard& board_;
  DesyncInquiry& inquiry_;
  Clock::time_point next_ = Clock::now();
  std::string answered_;
};

}  // namespace fsdp
