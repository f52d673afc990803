#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "late_device.hpp"

namespace fsdp::test {

/// One late device's streams, by the numbers that LibTorch knows them by. Thread-safe.
class LateStreams final : public HostStreams {
 public:
  LateStreams(int index, Options options);

  c10::Device device() const override { return late(index_); }
  StreamHandle current() override;

  c10::Stream default_stream() const { return stream(0); }
  /// As CUDA's: a few that are handed out in turn.
  c10::Stream next_of_pool();
  c10::Stream new_stream();
  StreamHandle handle(c10::StreamId id) const;
  /// The host waits for all of them.
  void synchronize_all();

 private:
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

  const int index_;
  mutable std::mutex mutex_;
  std::vector<StreamHandle> by_id_;  // the default stream, those of the pool and new ones as they are made
  std::vector<c10::StreamId> pool_;
  size_t handed_out_ = 0;
};

/// Throws where no LateDevices is alive.
LateStreams& late_streams(c10::DeviceIndex index);
StreamHandle handle_of(c10::Stream stream);

/// Of the calling thread.
c10::DeviceIndex current_late_device();
void set_current_late_device(c10::DeviceIndex index) noexcept;
c10::Stream current_late_stream(c10::DeviceIndex index);
void set_current_late_stream(c10::Stream stream);

/// Behind all that the current stream of that device has queued. It must throw nothing: `name` is what is told of it.
void enqueue_late(c10::DeviceIndex index, std::string name, std::function<void()> operation);
void note_host_wait(c10::DeviceIndex index);
/// The host waits for the current stream of that device, which is counted.
void wait_for_late(c10::DeviceIndex index);

}  // namespace fsdp::test
