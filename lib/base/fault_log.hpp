#pragma once

#include <mutex>
#include <string>
#include <vector>

namespace fsdp {

/// What the sanitizer mode has found for one group on one rank, until somebody throws it.
///
/// Thread-safe: memory is given back on any thread.
class FaultLog {
 public:
  explicit FaultLog(int rank) : rank_(rank) {}

  /// Logs the fault at once and keeps it, up to a number.
  void add(const std::string& fault);
  /// All kept since the last call.
  std::vector<std::string> take();

 private:
  const int rank_;
  std::mutex mutex_;
  std::vector<std::string> faults_;
};

}  // namespace fsdp
