#include "group/gather/gather_stream.hpp"

#include <utility>

namespace fsdp {

c10::Stream GatherStream::on(c10::Device device) {
  if (!stream_ || stream_->device() != device) stream_ = high_priority_stream(device);
  return *stream_;
}

std::optional<c10::Stream> GatherStream::to_wait_for_event(c10::Device device) {
  if (!SideStream::exists_on(device)) return std::nullopt;
  waits_for_event_ = true;
  return on(device);
}

void GatherStream::wait_for(const c10::Event& event) {
  if (event.device_type() == c10::DeviceType::CPU || !event.was_marked_for_recording()) return;
  if (const auto stream = to_wait_for_event(event.device())) event.block(*stream);
}

SideStream::Entered GatherStream::enter(c10::Device device, bool is_from_host) {
  if (!SideStream::exists_on(device) || !(waits_for_event_ || is_from_host)) return {};
  const auto stream = on(device);
  if (!waits_for_event_ && !std::exchange(is_behind_step_, true)) let_wait_for_current(stream);
  return SideStream::Entered(stream);
}

}  // namespace fsdp
