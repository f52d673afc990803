#include "base/side_stream.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp {

c10::Stream high_priority_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void record(std::optional<c10::Event>& event, c10::Stream stream) {
  if (!event || event->device_type() != stream.device_type()) event.emplace(stream.device_type());
  event->record(stream);
}

void let_wait_for_current(c10::Stream stream) {
  const auto current = current_stream(stream.device());
  if (current == stream) return;
  c10::Event event(stream.device_type());
  event.record(current);
  event.block(stream);
}

SideStream::Entered SideStream::enter(c10::Device device) {
  if (!exists_on(device)) return {};
  if (!stream_ || stream_->device() != device) {
    join();  // of the device where the root was before
    stream_ = high_priority_stream(device);
  }
  record(entered_, current_stream(device));
  entered_->block(*stream_);
  is_behind_ = false;
  return Entered(*stream_);
}

void SideStream::let_current_wait() {
  if (is_behind_) return;
  record(reached_, *stream_);
  reached_->block(current_stream(stream_->device()));
}

void SideStream::join() {
  let_current_wait();
  is_behind_ = true;
}

}  // namespace fsdp
