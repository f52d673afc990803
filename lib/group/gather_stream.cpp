#include "group/gather_stream.hpp"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp {

GatherStream::Beside GatherStream::enter(c10::Device device) {
  if (!event_ || device.is_cpu() || event_->device_type() != device.type()) return {};
  if (!stream_) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  event_->block(*stream_);
  return Beside(*stream_);
}

void GatherStream::Beside::hand_over(std::initializer_list<const at::Tensor*> buffers) const {
  if (!guard_) return;
  const auto before = guard_->original_stream();
  c10::Event queued(before.device_type());
  queued.record(guard_->current_stream());
  queued.block(before);
  for (const auto* buffer : buffers)
    if (buffer->defined()) buffer->record_stream(before);
}

}  // namespace fsdp
