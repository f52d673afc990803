#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace fsdp {

/// From which stream a gather was launched, and on which its memory is used (Note [Streams of a root]). Nothing on a
/// device without streams, and where nothing was launched.
class StreamUse {
 public:
  /// A gather has been launched on the current stream.
  void record_launch(c10::Device device);
  /// The current stream, on which it will be used, goes on behind the launch. One rank's gather is copies alone: its work
  /// waits for nothing.
  void wait_before_use();
  /// Nobody will use it. True: the launch was written into a graph, and the current stream goes on behind it, as it has to
  /// behind the collective. unknown: where nobody can tell.
  bool joins_in_capture(bool unknown);
  /// What was gathered has been made readable on the current stream; the memory that was sent is about to be freed.
  void end_gather();
  /// The current stream uses it, too, and goes on behind what has made it readable.
  void wait_before_another_use() {
    if (!used_on_.empty()) let_current_use();
  }
  /// The memory that it was launched with is about to be freed: the stream that this goes back to waits for all who used it.
  /// If these are one there is nothing to wait for; a stream that was the current one outside a graph's capture is not
  /// to come into it.
  void wait_before_free() const;
  /// The memory is about to be somebody's who waits for the current stream alone.
  void let_current_wait_for_uses() const;
  /// The gather goes on in other memory, of the current stream.
  void move_to_current();

 private:
  void let_current_use();

  std::optional<c10::Stream> launched_on_;
  c10::SmallVector<c10::Stream, 2> used_on_;  // the first one has made it readable
  std::optional<c10::Event> launched_, readable_;
  bool has_several_ = false;  // some gather was used on several streams: from then on it is recorded when one is readable
  bool is_recorded_ = false;
};

}  // namespace fsdp
