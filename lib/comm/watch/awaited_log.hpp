#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace fsdp {

/// The collectives of a communicator that this rank's host has waited for, outside of any group of parameters. All ranks of
/// the communicator make the same, in one order with the groups' own. Thread-safe.
class AwaitedLog {
 public:
  struct State {
    uint64_t count = 0;     ///< never falls
    std::string last = {};  ///< "all_reduce of 'clip_grad_norm_'"
  };

  /// Another one is about to be launched. Returns how many came before it.
  uint64_t note(const char* operation, std::string_view subject) {
    std::lock_guard lock(mutex_);
    operation_ = operation;
    subject_ = subject;
    return count_.fetch_add(1, std::memory_order_acq_rel);
  }

  uint64_t count() const {
    return count_.load(std::memory_order_acquire);
  }
  State state() const {
    std::lock_guard lock(mutex_);
    return {.count = count(), .last = count() == 0 ? "" : std::string(operation_) + " of '" + subject_ + "'"};
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<uint64_t> count_{0};
  const char* operation_ = "";
  std::string subject_;
};

}  // namespace fsdp
