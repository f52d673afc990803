#include "comm/gloo/waited_message.hpp"

namespace fsdp {

void WaitedMessage::begin(c10d::Work& message, int peer) {
  message_ = &message;
  peer_ = peer;
  gone_since_ = kNever;
}

bool WaitedMessage::end() {
  message_ = nullptr;
  return is_stuck_;
}

void WaitedMessage::abort_if_stuck(const std::function<bool(int peer)>& is_gone) {
  // What came before the connection ended has been seen long before that.
  constexpr auto kStuckAfter = std::chrono::seconds(1);
  if (message_ == nullptr || !is_gone(peer_)) return;
  const auto now = std::chrono::steady_clock::now();
  if (gone_since_ == kNever) gone_since_ = now;
  if (now - gone_since_ < kStuckAfter) return;
  is_stuck_ = true;
  message_->abort();
}

}  // namespace fsdp
