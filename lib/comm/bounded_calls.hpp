#pragma once

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp {

/// Who was asked has not answered in time: it is cut off, or hangs.
class NoAnswer : public CommError {
 public:
  using CommError::CommError;
};

/// Calls that may never come back, such as a question to a server that this process has lost: each runs in a thread of
/// its own, which is left behind if it takes too long. Thread-safe.
class BoundedCalls {
 public:
  /// whom: "the rendezvous store", for the message.
  explicit BoundedCalls(std::string whom) : whom_(std::move(whom)) {}

  /// Calls `body`, and returns or throws what it does. Throws NoAnswer after `bound`; and at once, without a call, while an
  /// earlier one is out for longer than its bound, so that many calls together wait no longer than one. body: owns all that it
  /// uses; it may go on after this has thrown, and after all else has gone.
  template <class Body>
  std::invoke_result_t<Body> within(std::chrono::milliseconds bound, Body body) {
    if (overdue_->load() > 0) throw no_answer(bound);
    // Whoever comes second, the caller that gives up or the call that returns, knows that the call is not out any more.
    const auto is_settled = std::make_shared<std::atomic<bool>>(false);
    std::packaged_task<std::invoke_result_t<Body>()> task(std::move(body));
    auto result = task.get_future();
    std::thread([task = std::move(task), is_settled, overdue = overdue_]() mutable {
      task();
      if (is_settled->exchange(true)) --*overdue;
    }).detach();
    if (result.wait_for(bound) == std::future_status::ready) return result.get();
    ++*overdue_;
    if (is_settled->exchange(true)) --*overdue_;
    throw no_answer(bound);
  }

 private:
  NoAnswer no_answer(std::chrono::milliseconds bound) const {
    return NoAnswer(
        fmt::format("{} has not answered within {} ms: this process is cut off from it, or what serves it hangs", whom_,
                    bound.count()));
  }

  const std::string whom_;
  const std::shared_ptr<std::atomic<int>> overdue_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace fsdp
