#pragma once

#include <c10/core/Device.h>

#include <memory>

struct CUstream_st;

namespace fsdp {

/// What CUDA calls cudaStream_t, named without its headers. Null: the default stream.
using StreamHandle = CUstream_st*;

enum class StreamPriority { kNormal, kHigh };

/// A point in a stream. Thread-safe.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
  /// True once all that was queued in front of it has run. Asks, never waits; throws what the device reports.
  virtual bool is_done() const = 0;
};

/// All that a communicator needs of a device's streams: small, so that another implementation, with threads for
/// streams, can show on any machine whether every wait is there. Thread-safe.
class CommStreams {
 public:
  virtual ~CommStreams() = default;

  virtual c10::Device device() const = 0;
  /// It lives at least as long as this object.
  virtual StreamHandle make_stream(StreamPriority priority) = 0;
  /// The one on which the calling thread queues its operators.
  virtual StreamHandle current() = 0;
  virtual std::shared_ptr<StreamEvent> record(StreamHandle stream) = 0;
  /// What is queued on `stream` from now on runs behind `event`. The host does not wait.
  virtual void wait(StreamHandle stream, const StreamEvent& event) = 0;
  /// Operations are written into a CUDA graph instead of being run; events recorded meanwhile may be waited for by
  /// streams, and not be asked.
  virtual bool is_capturing(StreamHandle stream) = 0;
};

/// The streams of a CUDA device. Those it makes come from LibTorch's pool of 32 for each priority, which hands them
/// out in turn: two users of one stream share its order. Only in builds with CUDA.
std::shared_ptr<CommStreams> cuda_streams(c10::Device device);

}  // namespace fsdp
