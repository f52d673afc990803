#pragma once

#include <optional>

#include "base/side_stream.hpp"

namespace fsdp {

// Note [Streams of a root]
// Operators of modules run on whatever stream is current; here it is called the compute stream. Collectives run on the
// communicator's own streams, each behind the stream that was current at its launch, and whoever waits for one makes
// the stream wait that is current then. So it is the current stream at these two moments that decides what stands
// still for a collective:
//
// - reductions are launched and waited for on a stream of their own, where they are also divided, cast, added to the
//   gradients that are there, and copied to the host. The compute stream waits for it once, at the end of a backward,
//   and in front of that only to take the memory of packed gradients back (set_reduce_scatter_max_input_buffers).
// - gathers are launched on the compute stream, in front of what is computed next, or on a stream of their own where
//   that pays: what comes from the host is copied beside compute, and behind a post-optimizer event not all that was
//   queued before is waited for.
//
// Memory. LibTorch gives freed memory out again at once, to the stream that it was allocated for. Who frees what another
// stream may still use records no stream with the allocator, which would hold the memory back by guess; instead
// 1. what a gather was allocated with is freed where the module's operators run, and the stream that it was allocated for
//    waits for them then: the gathers' own, or a user's who has called unshard_async there;
// 2. a side stream of reductions waits for the compute stream each time it is entered, and so for all who may have used
//    what is allocated on it;
// 3. what the compute stream allocated and a side stream uses is referred to until the compute stream waits for that.
// A StreamBuffer is what holds memory of rules 1 and 3, and does that waiting.
//
// Several compute streams. A module may run its parts on streams of its own, which wait for each other as its own tensors
// need; parameters and gradients are the runtime's business. The first use of a group waits for its gather, on the stream that
// is current; a use on another stream goes on behind what has made the group readable. What packs gradients waits
// for every stream on which autograd has accumulated one (GradientStreams). Whose memory these gradients are nobody knows:
// they alone are recorded with the allocator, as autograd does where it takes a gradient from stream to stream.
//
// Graphs. Each stream that has waited for a captured one has to be waited for before the capture ends. So whatever is given up,
// and whatever memory goes back to another stream than the current one, is joined to the current stream while a graph is
// captured (join_in_capture).

/// Where all-gathers are launched from, if not from the stream that computes (Note [Streams of a root]): behind a
/// post-optimizer event, and for what is copied from the host. On a device without streams it does nothing.
///
/// Not thread-safe: the root's lock guards it.
class GatherStream {
 public:
  /// Gathers wait for `event` instead of for what is queued on the current stream, until `end_wait_for_event`.
  void wait_for(const c10::Event& event);
  /// Returns the stream that is to wait, for who can let it wait for an event of another kind. Null: the device has no streams.
  std::optional<c10::Stream> to_wait_for_event(c10::Device device);
  void end_wait_for_event() { waits_for_event_ = false; }

  /// A step begins: what has been written until now is what it gathers. But for an event that says which.
  void begin_step() { is_behind_step_ = false; }
  /// Enters it if a gather is to be launched there.
  [[nodiscard]] SideStream::Entered enter(c10::Device device, bool is_from_host);
  /// A step ends, or is given up: a graph must not end with a stream for which nobody waits.
  void end_step() const {
    if (stream_) join_in_capture(*stream_);
  }

 private:
  c10::Stream on(c10::Device device);

  std::optional<c10::Stream> stream_;  // one for the root's life, or its time on a device
  bool waits_for_event_ = false;
  bool is_behind_step_ = false;  // its beginning
};

}  // namespace fsdp
