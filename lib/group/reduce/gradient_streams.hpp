#pragma once

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "base/side_stream.hpp"

namespace fsdp {

class GradientStore;

/// On which streams autograd has accumulated those gradients of one group that no reduction has taken. It runs each on the
/// stream on which the parameter was used in forward, and they need not wait for each other before the end of the backward.
/// Nothing on a device without streams. Not thread-safe: the root's lock guards it.
class GradientStreams {
 public:
  /// A gradient has been accumulated on the current stream.
  void note(c10::Device device) {
    if (SideStream::exists_on(device)) note_current(current_stream(device));
  }
  /// The current stream, which is to take them, goes on behind all of them; and their memory, of whichever stream it is, is
  /// not given out again before it is done with them.
  void take(const GradientStore& store);
  /// The current stream is behind all of them, as autograd leaves it at the end of a backward. It is about to add up those
  /// that no reduction has taken, whose memory may be its own from now on.
  void end_backward(const GradientStore& store);
  void drop();

 private:
  void note_current(c10::Stream stream);

  c10::SmallVector<c10::Stream, 2> to_wait_for_;  // of the backward under way
  std::optional<c10::Stream> first_;              // since the last reduction
  bool are_several_ = false;                      // beside the first one, since then
};

}  // namespace fsdp
