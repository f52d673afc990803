#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "collectives/all_gather.hpp"
#include "collectives/stream_buffer.hpp"

namespace fsdp {

/// What a group's unsharded parameters lie in, what the gather under way was launched with, and the buffer of a released group
/// that keeps it for its next gather. Each goes back to the stream that it was allocated for.
class UnshardedMemory {
 public:
  /// 1-D bytes; undefined while the group is released.
  const at::Tensor& bytes() const { return buffer_.bytes(); }
  /// They are a slot's, which is another's to keep (GatherSlots): so from the launch of the gather on.
  void set_is_slot(bool value) { is_slot_ = value; }
  bool is_slot() const { return is_slot_; }

  // --- a gather
  /// On a device with streams: the gather has been launched on the current one, which has allocated all that it fills and
  /// sends, but for what was kept. owns_input: what it sends goes when it has arrived.
  void note_launch(const AllGather& gather, bool owns_input);
  /// The current stream, on which it will be read, goes on behind the launch. One rank's gather is copies alone: its work waits
  /// for nothing.
  void begin_arrival() {
    launched_.wait_until_ready();
    launched_.note_use();
  }
  /// The current stream has filled `bytes`, which are of the launch, or allocated on that stream.
  void set(at::Tensor bytes) {
    buffer_.set(std::move(bytes));
    buffer_.note_readable();
  }
  /// What the gather was launched with goes.
  void end_arrival() { launched_.reset(); }
  /// Nobody will use it. True: the launch was written into a graph, and the current stream goes on behind it, as it has to
  /// behind the collective. unknown: where nobody can tell.
  bool joins_in_capture(bool unknown) const;
  /// It has failed or is given up, or the group goes with what is unsharded.
  void drop() noexcept {
    launched_.drop();
    buffer_.drop();
  }

  // --- what is unsharded
  /// The current stream uses it, too, and goes on behind what has made it readable.
  void begin_use() { buffer_.begin_use(); }
  /// The current stream goes on behind all other uses, and is about to be the last one that reads it.
  void join_uses() { buffer_.join_uses(); }
  /// Gives up the slot behind that. It is another's now, whose gather waits for the current stream or is launched where this
  /// one was.
  void leave_slot() {
    buffer_.reset();
    is_slot_ = false;
  }
  void release();

  // --- what is kept
  /// Counts from the next release on; what is kept already goes if not.
  void set_keeps(bool keeps) {
    keeps_ = keeps;
    if (!keeps) drop_kept();
  }
  bool keeps() const { return keeps_; }
  int64_t kept_bytes() const { return kept_.bytes().defined() ? kept_.bytes().numel() : 0; }
  void drop_kept() { kept_.drop(); }
  /// For the gather that is to be launched; undefined: nothing is kept.
  at::Tensor take_kept() {
    if (!kept_.bytes().defined()) return {};
    buffer_ = std::move(kept_);
    return buffer_.bytes();
  }
  /// The current stream goes on behind the last use of what is kept.
  void wait_for_last_use() const { kept_.wait_until_ready(); }

 private:
  StreamBuffer buffer_, launched_, kept_;
  bool keeps_ = false, is_slot_ = false;
};

}  // namespace fsdp
