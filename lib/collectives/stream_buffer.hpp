#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/side_stream.hpp"

namespace fsdp {

/// Holds memory and knows the stream that it goes back to, for which it was allocated (Note [Streams of a root]): LibTorch
/// gives it out again there at once. So when it goes that stream waits for all who have used it, as they were noted here.
/// If these are one there is nothing to wait for; a stream that was the current one outside a graph's capture is not to come
/// into it. On a device without streams this is a tensor and nothing more, and all that is said of streams does nothing.
///
/// Not thread-safe: the root's lock guards it.
class StreamBuffer {
 public:
  StreamBuffer() = default;
  StreamBuffer(StreamBuffer&&) noexcept = default;
  /// What this one has goes as by `drop`.
  StreamBuffer& operator=(StreamBuffer&& other) noexcept;
  ~StreamBuffer() { drop(); }

  /// Undefined: it is empty, or only holds memory that others point at.
  const at::Tensor& bytes() const { return bytes_; }
  /// Names the stream that it goes back to; none: it is empty, or has no streams.
  std::optional<c10::Stream> owner() const { return streams_ ? streams_->owner : std::nullopt; }

  // --- what is in it
  /// Goes back to the current stream from now on, on which it is about to be allocated. It is empty.
  void begin(c10::Device device) {
    if (SideStream::exists_on(device)) [[unlikely]]
      set_owner(current_stream(device));
  }
  /// Goes back to the same stream as `other`.
  void begin(const StreamBuffer& other) {
    if (const auto owner = other.owner()) [[unlikely]]
      set_owner(*owner);
  }
  /// Takes the memory. If it has no owner yet, the current stream has allocated it.
  void set(at::Tensor bytes) {
    bytes_ = std::move(bytes);
    if (!owner()) begin(bytes_.device());
  }
  /// Keeps memory of the same owner until that has waited, whoever else lets go of it. On a device without streams the others
  /// alone keep it.
  void hold(const at::Tensor& tensor) {
    if (streams_ && tensor.defined()) [[unlikely]]
      streams_->held.push_back(tensor);
  }

  // --- who uses it
  /// Marks the end of what the current stream has queued: behind that it may be used, or written anew.
  void record_ready() { mark_current(/*is_last_use=*/false); }
  /// Lets the current stream go on behind that mark, if it is another's.
  void wait_until_ready() const {
    if (streams_) [[unlikely]]
      let_current_wait_for_mark();
  }
  /// Notes that the current stream has made it readable, and is the first to use it.
  void note_readable() {
    if (streams_) [[unlikely]]
      start_uses();
  }
  /// Lets the current stream use it, too, behind what has made it readable; nothing where nobody has.
  void begin_use() {
    if (streams_) [[unlikely]]
      use_on_current();
  }
  /// Notes that the current stream uses it, which has nothing to wait for.
  void note_use() {
    if (streams_) [[unlikely]]
      note_current();
  }
  /// Marks the end of what the current stream has queued: its last use of it.
  void record_last_use() { mark_current(/*is_last_use=*/true); }
  /// Lets the current stream go on behind all uses that were noted, if there are any. It alone counts from now on: the memory
  /// is about to be somebody's who waits for that stream and no other.
  void join_uses();

  // --- letting go
  /// Lets the owner wait for all uses until now, which are over then. False: there was nothing to wait for.
  bool let_owner_wait();
  /// Gives the memory back behind that. While a graph is captured the current stream goes on behind an owner that has waited.
  void reset() {
    if (streams_) [[unlikely]]
      empty_streams();
    bytes_.reset();
  }
  /// Resets it where nobody can take an error, which is logged.
  void drop() noexcept {
    if (streams_) [[unlikely]]
      empty_streams_or_log();
    bytes_.reset();
  }

 private:
  using UsingStreams = c10::SmallVector<c10::Stream, 2>;

  struct Streams {
    std::optional<c10::Stream> owner = {};
    UsingStreams used_on = {};  // where one has made it readable, that is the first
    std::optional<c10::Event> mark = {};
    std::optional<c10::Stream> marked_on = {};  // none: the mark says nothing yet
    bool is_last_use = false;                   // what is marked
    bool has_several = false;  // what was here was used on several streams: what is next is marked when it is readable
    std::vector<at::Tensor> held = {};

    bool is_used_on(c10::Stream stream) const { return std::ranges::find(used_on, stream) != used_on.end(); }
  };

  void set_owner(c10::Stream owner);
  void mark_current(bool is_last_use);
  void let_current_wait_for_mark() const;
  void start_uses();
  void use_on_current();
  void note_current();
  void empty_streams();
  void empty_streams_or_log() noexcept;

  at::Tensor bytes_;
  std::unique_ptr<Streams> streams_;  // null until it is used on a device that has some
};

}  // namespace fsdp
