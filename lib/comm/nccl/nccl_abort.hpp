// Only in builds with CUDA.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <mutex>
#include <string>

#include "comm/failure_flag.hpp"

namespace fsdp {

/// Why a group has failed, if it has, and what is done about it: NCCL is aborted, and the other ranks are told, each on a
/// thread of its own, as NCCL may take its time or never return, and the store may be gone. Thread-safe.
class NcclAbort {
 public:
  /// The first reason stays, and what comes with it is run, once. Returns at once.
  /// end_links, tell_others: own what they use; they do not throw.
  void begin(const std::string& reason, std::function<void()> end_links, std::function<void()> tell_others);

  bool has_begun() const { return failure_.is_set(); }
  /// Says why the group has failed. To be called only once the abort has begun.
  const std::string& reason() const { return failure_.reason(); }

  enum class Links { kAreUsed, kAreEnding, kHaveEnded };
  /// kAreEnding: they have not come to an end by `end`. kAreUsed, at once: nobody has set about ending them.
  Links await_links(std::chrono::steady_clock::time_point end) const;
  /// Waits until all is done that has begun, or until `end`.
  void await(std::chrono::steady_clock::time_point end) const;

 private:
  FailureFlag failure_;
  mutable std::mutex mutex_;
  std::shared_future<void> links_ended_;  // both valid once an abort has begun
  std::shared_future<void> others_told_;
};

}  // namespace fsdp
