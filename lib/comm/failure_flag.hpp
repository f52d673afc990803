#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/work.hpp"

namespace fsdp {

/// Why a group was aborted, if it was. Thread-safe; asking costs one load while nothing is wrong.
class FailureFlag {
 public:
  /// Sets the reason, unless there is one already: the first one stays. True if this is the first.
  bool set(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (is_set_.load(std::memory_order_relaxed)) return false;
    reason_ = reason;
    is_set_.store(true, std::memory_order_release);
    return true;
  }

  bool is_set() const { return is_set_.load(std::memory_order_acquire); }

  /// Returns the reason, which never changes once it is there. To be called only once `is_set()`.
  const std::string& reason() const { return reason_; }

  /// Throws CommError if the group was aborted.
  void check(const char* operation, std::string_view subject, const Communicator& comm) const {
    if (is_set()) [[unlikely]]
      CollectiveInfo(operation, subject, comm, 0).fail(reason_);
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_set_{false};
  std::string reason_;
};

}  // namespace fsdp
