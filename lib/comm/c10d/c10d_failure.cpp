#include "comm/c10d/c10d_failure.hpp"

namespace fsdp {

void C10dFailure::fail(const std::string& reason) {
  if (set(reason)) disconnect();
}

void C10dFailure::disconnect() noexcept {
  std::lock_guard lock(mutex_);
  if (connections_) connections_->disconnect();
}

void C10dFailure::fail_stuck_waits() noexcept {
  std::lock_guard lock(mutex_);
  if (connections_) connections_->fail_stuck_waits();
}

void C10dFailure::forget_connections() noexcept {
  std::lock_guard lock(mutex_);
  connections_ = nullptr;
}

}  // namespace fsdp
