#pragma once

#include <chrono>
#include <cstdint>

#include "trace/desync/desync_board.hpp"
#include "trace/desync/verdict/desync_verdict.hpp"

namespace fsdp {

/// Compares every entry of the log with all other ranks', before its collective is launched. The training thread's own.
class EntryCheck {
 public:
  /// timeout: how long the others have to come to an entry. `board` and `verdict` outlive this.
  EntryCheck(DesyncBoard& board, const DesyncVerdict& verdict, std::chrono::milliseconds timeout)
      : board_(board), verdict_(verdict), timeout_(timeout) {}

  /// Waits until all ranks have come to the last entry before `position`. Throws CommError if one has another there or
  /// does not come. Returns at once where there is a verdict.
  void compare(CollectiveLog::Position position);

 private:
  void compare_with(int peer, CollectiveLog::Position position, std::chrono::steady_clock::time_point deadline);

  DesyncBoard& board_;
  const DesyncVerdict& verdict_;
  const std::chrono::milliseconds timeout_;
  uint64_t last_hash_ = 0;
};

}  // namespace fsdp
