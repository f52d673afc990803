#include "comm/watch/one_thread.hpp"

#include <fmt/format.h>

namespace fsdp {

std::optional<std::string> OneThread::enter(const Use& use) {
  const auto caller = std::this_thread::get_id();
  std::lock_guard lock(mutex_);
  if (depth_ == 0) {
    holder_ = caller;
    use_ = use;
  } else if (holder_ != caller) {
    return fmt::format("one is in {} of '{}', another one comes with {} of '{}'", use_.operation, use_.subject, use.operation,
                       use.subject);
  }
  ++depth_;
  return std::nullopt;
}

void OneThread::leave() {
  std::lock_guard lock(mutex_);
  --depth_;
}

}  // namespace fsdp
