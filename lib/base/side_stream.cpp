#include "base/side_stream.hpp"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>

namespace fsdp {

c10::Stream high_priority_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void record(std::optional<c10::Event>& event, c10::Stream stream) {
  if (!event || event->device_type() != stream.device_type()) event.emplace(stream.device_type());
  event->record(stream);
}

void let_wait_for(c10::Stream stream, c10::Stream before) {
  if (before == stream) return;
  c10::Event event(stream.device_type());
  event.record(before);
  event.block(stream);
}

void let_wait_for_current(c10::Stream stream) { let_wait_for(stream, current_stream(stream.device())); }

namespace {

std::array<std::atomic<CaptureQuery>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> capture_queries{};

auto& capture_query_of(c10::DeviceType type) { return capture_queries.at(static_cast<size_t>(type)); }

/// Asks the guard where LibTorch has the question, and else the query that was set for the device type.
template <class Guard>
std::optional<bool> is_capturing_by(const Guard& guard, c10::Stream stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    const CaptureQuery query = capture_query_of(stream.device_type());
    return query != nullptr ? std::optional(query(stream)) : std::nullopt;
  }
}

}  // namespace

void set_capture_query(c10::DeviceType type, CaptureQuery query) { capture_query_of(type) = query; }

std::optional<bool> is_capturing(c10::Stream stream) {
  return is_capturing_by(c10::impl::VirtualGuardImpl(stream.device_type()), stream);
}

bool is_before_capture(c10::Stream before, c10::Stream stream) {
  return is_capturing(stream).value_or(false) && !is_capturing(before).value_or(true);
}

void join_in_capture(c10::Stream stream) {
  const auto current = current_stream(stream.device());
  if (stream == current || !is_capturing(stream).value_or(false)) return;
  if (is_capturing(current).value_or(false)) let_wait_for(current, stream);
}

void record_use(const at::Tensor& tensor, c10::Stream stream) {
  if (!tensor.defined() || tensor.device().type() != stream.device_type()) return;
  if (tensor.is_sparse()) {
    record_use(tensor._indices(), stream);
    record_use(tensor._values(), stream);
  } else if (tensor.has_storage()) {
    c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
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
