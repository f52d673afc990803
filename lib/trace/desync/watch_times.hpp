#pragma once

#include <algorithm>
#include <chrono>

namespace fsdp {

struct WatchTimes {
  std::chrono::milliseconds late_after;
  std::chrono::milliseconds compare_after;
  std::chrono::milliseconds timeout;

  /// A rank that has nothing to ask looks so often whether another one does.
  std::chrono::milliseconds between_polls() const { return std::min(late_after / 6, compare_after); }
  /// How long a rank that has found something wrong waits for the others to say what they did.
  std::chrono::milliseconds settling() const {
    using std::chrono::milliseconds;
    return std::min(milliseconds(2000), std::max(milliseconds(100), late_after));
  }
};

}  // namespace fsdp
