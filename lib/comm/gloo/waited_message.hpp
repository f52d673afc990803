#pragma once

#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fsdp {

// Note [Messages cut in two]
// Gloo wakes nobody whose message was half-way when its connection ended, be it that the peer's process was killed or that it
// disconnected. So whoever waits for a collective asks now and then whether the peer is gone. Only for collectives that are
// made of messages here: those of gloo's own, which nobody else can wake, wait until the timeout in this case.

/// The message that a collective waits for, and since when its peer has been gone. Not thread-safe.
class WaitedMessage {
 public:
  void begin(c10d::Work& message, int peer);
  /// True if the wait was ended by `abort_if_stuck`.
  bool end();
  /// Ends the wait for a message whose peer has been gone for some time.
  void abort_if_stuck(const std::function<bool(int peer)>& is_gone);

 private:
  c10d::Work* message_ = nullptr;
  int peer_ = 0;
  std::chrono::steady_clock::time_point gone_since_ = kNever;
  bool is_stuck_ = false;

  static constexpr auto kNever = std::chrono::steady_clock::time_point::max();
};

}  // namespace fsdp
