#include "dispatch/param_owner.hpp"

#include "base/side_stream.hpp"

namespace fsdp {

void ParamOwner::set_ready(int64_t task, const std::optional<c10::Stream>& stream) {
  if (stream) ready_device_.store(stream->device(), std::memory_order_relaxed);
  ready_stream_.store(stream ? stream->id() : kAnyStream, std::memory_order_relaxed);
  ready_task_.store(task, std::memory_order_release);
}

bool ParamOwner::is_ready_on_current_stream() const {
  const auto stream = ready_stream_.load(std::memory_order_relaxed);
  return current_stream(ready_device_.load(std::memory_order_relaxed)).id() == stream;
}

}  // namespace fsdp
