#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace fsdp {

/// Holds a high-priority stream of a device, beside the current one. On a device without streams it does nothing. Not
/// thread-safe: the root's lock guards it.
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

  /// Makes the side stream current for as long as the result lives. The side stream waits for all that is queued on the stream
  /// that was current.
  [[nodiscard]] Entered enter(c10::Device device);
  /// Lets the current stream wait for all that has been queued on this one, if anything has since the last call.
  void join();
  /// Lets the current stream wait as `join` does, but more is to be queued here, and `join` is to come.
  void let_current_wait();

 private:
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> entered_, reached_;
  bool is_behind_ = true;  // the current stream has waited for all of it
};

/// Returns a stream of the device's pool, which hands its streams out in turn: two users of one share its order.
c10::Stream high_priority_stream(c10::Device device);

/// Records `event` at the end of what `stream` has queued, and makes the event first if it is needed.
void record(std::optional<c10::Event>& event, c10::Stream stream);

c10::Stream current_stream(c10::Device device);

/// Lets what `stream` queues from now on wait for all that `before` has queued, if that is another stream.
void let_wait_for(c10::Stream stream, c10::Stream before);
/// Lets what `stream` queues from now on wait for all that the current stream has queued, if that is another stream.
void let_wait_for_current(c10::Stream stream);

/// True if what is queued on `stream` is captured in a graph and not run. nullopt: nobody can tell.
std::optional<bool> is_capturing(c10::Stream stream);
/// Answers for devices of this type where LibTorch cannot tell (2.11).
using CaptureQuery = bool (*)(c10::Stream stream);
void set_capture_query(c10::DeviceType type, CaptureQuery query);
/// True if `stream` captures a graph and `before` does not: a graph may not wait for that, and who began the capture has waited
/// for it.
bool is_before_capture(c10::Stream before, c10::Stream stream);
/// Lets the current stream wait for `stream` if both capture a graph, which must not end with a stream that nobody waits for.
void join_in_capture(c10::Stream stream);

/// Tells the allocator that `stream` uses the memory of `tensor`, as at::Tensor::record_stream does: once it is freed, nobody
/// gets it before `stream` is done with what it has queued by then. For memory of which nobody knows the stream that it was
/// allocated for; does nothing on a device without streams.
void record_use(const at::Tensor& tensor, c10::Stream stream);

}  // namespace fsdp
