#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace fsdp {

/// A stream of a device beside the current one, of high priority. On a device without streams it does nothing.
/// Not thread-safe: the root's lock guards it.
class SideStream {
 public:
  /// While it lives the side stream is the current one.
  class Entered {
   public:
    Entered() = default;
    explicit Entered(c10::Stream stream) : guard_(std::in_place, stream) {}
    bool is_beside() const { return guard_.has_value(); }

   private:
    std::optional<c10::StreamGuard> guard_;
  };

  static bool exists_on(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }

  /// Behind all that is queued on the current stream.
  [[nodiscard]] Entered enter(c10::Device device);
  /// The current stream goes on behind all that has been queued on this one, if anything has since the last call.
  void join();
  /// The same, at a point in the middle: more is queued here, and `join` is to come.
  void let_current_wait();
  /// What is queued here from now on runs behind `event`.
  void wait_for(const c10::Event& event) { event.block(*stream_); }

 private:
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> entered_, reached_;
  bool is_behind_ = true;  // the current stream has waited for all of it
};

/// From the device's pool, which hands its streams out in turn: two users of one share its order.
c10::Stream high_priority_stream(c10::Device device);

/// `event` is at the end of what `stream` has queued.
void record(std::optional<c10::Event>& event, c10::Stream stream);

c10::Stream current_stream(c10::Device device);

/// What `stream` queues from now on runs behind all that `before` has queued, if that is another one.
void let_wait_for(c10::Stream stream, c10::Stream before);
/// What `stream` queues from now on runs behind all that the current stream has queued, if that is another one.
void let_wait_for_current(c10::Stream stream);

/// What is queued on `stream` is written into a graph instead of being run. None: nobody can tell.
std::optional<bool> is_capturing(c10::Stream stream);
/// Answers for devices of this type where LibTorch cannot tell (2.11).
using CaptureQuery = bool (*)(c10::Stream stream);
void set_capture_query(c10::DeviceType type, CaptureQuery query);
/// `stream` writes into a graph and `before` does not, which a graph may not wait for. Who begins a capture has waited for it.
bool is_before_capture(c10::Stream before, c10::Stream stream);
/// A graph must not end with a stream for which nobody waits. If `stream` and the current one write into one, the current one
/// goes on behind it.
void join_in_capture(c10::Stream stream);

/// When the memory of `tensor` is freed, its allocator gives it to nobody before `stream` is done with what it has queued by
/// then. For memory of which nobody knows the stream that it was allocated for; nothing on a device without streams.
void record_use(const at::Tensor& tensor, c10::Stream stream);

}  // namespace fsdp
