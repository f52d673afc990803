#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "late_device.hpp"

namespace fsdp::test {

class LateCapture;

struct LateGraphId {
  int pool = 0;                                 ///< of the memory that is allocated in its capture
  std::shared_ptr<const void> life = nullptr;  ///< as long as the graph
};

/// One late device's streams, by the numbers that LibTorch knows them by. Thread-safe.
class LateStreams final : public HostStreams {
 public:
  LateStreams(int index, Options options);

  c10::Device device() const override { return late(index_); }
  StreamHandle current() override;
  std::shared_ptr<StreamEvent> record(StreamHandle stream) override;
  void wait(StreamHandle stream, const StreamEvent& event) override;
  bool is_capturing(StreamHandle stream) override { return capture_of(stream) != nullptr; }

  c10::Stream default_stream() const { return stream(0); }
  bool is_default(StreamHandle stream) const { return stream == handle(0); }
  /// As CUDA's: a few that are handed out in turn.
  c10::Stream next_of_pool();
  c10::Stream new_stream();
  StreamHandle handle(c10::StreamId id) const;
  /// The host waits for all of them.
  void synchronize_all();

  /// Graphs (late_capture.hpp). On the current stream.
  std::shared_ptr<LateCapture> begin_capture(LateGraphId graph);
  void end_capture(const std::shared_ptr<LateCapture>& capture);
  /// Null: what is queued there runs.
  std::shared_ptr<LateCapture> capture_of(StreamHandle stream) const;
  bool is_capturing() const;
  /// Throws, and the capture is spoilt, if `stream` is captured or this thread has begun a capture here: `what` would ask or
  /// wait. stream: null: none.
  void refuse_in_capture(StreamHandle stream, const char* what) const;

 private:
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

  const int index_;
  mutable std::mutex mutex_;
  std::vector<StreamHandle> by_id_;  // the default stream, those of the pool and new ones as they are made
  std::vector<c10::StreamId> pool_;
  size_t handed_out_ = 0;
  std::vector<std::shared_ptr<LateCapture>> captures_;
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
/// `what`, of `stream` if that is not null, which a capture does not bear.
void note_host_wait(c10::DeviceIndex index, StreamHandle stream, const char* what);
void note_recorded(c10::DeviceIndex index);
/// The host waits for the current stream of that device, which is counted.
void wait_for_late(c10::DeviceIndex index);

}  // namespace fsdp::test
