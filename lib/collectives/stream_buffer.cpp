#include "collectives/stream_buffer.hpp"

#include "base/log.hpp"

namespace fsdp {

StreamBuffer& StreamBuffer::operator=(StreamBuffer&& other) noexcept {
  if (this == &other) return *this;
  drop();
  bytes_ = std::move(other.bytes_);
  streams_ = std::move(other.streams_);
  return *this;
}

void StreamBuffer::set_owner(c10::Stream owner) {
  if (!streams_) streams_ = std::make_unique<Streams>();
  streams_->owner = owner;
}

void StreamBuffer::mark_current(bool is_last_use) {
  const auto to = owner();
  if (!to) return;
  streams_->marked_on = current_stream(to->device());
  streams_->is_last_use = is_last_use;
  record(streams_->mark, *streams_->marked_on);
}

void StreamBuffer::let_current_wait_for_mark() const {
  if (!streams_->owner || !streams_->marked_on) return;
  const auto current = current_stream(streams_->owner->device());
  if (current != *streams_->marked_on) streams_->mark->block(current);
}

void StreamBuffer::start_uses() {
  if (!streams_->owner) return;
  const auto current = current_stream(streams_->owner->device());
  streams_->used_on.assign(1, current);
  streams_->marked_on.reset();
  // Not into a graph: what it makes readable may be used behind the capture.
  if (streams_->has_several && !is_capturing(current).value_or(false)) record_ready();
}

void StreamBuffer::use_on_current() {
  if (streams_->used_on.empty()) return;
  const auto first = streams_->used_on[0];
  const auto current = current_stream(first.device());
  if (streams_->is_used_on(current) || is_before_capture(first, current)) return;
  // The first time this waits for more than it needs, so that programs with one stream record nothing.
  if (streams_->marked_on)
    streams_->mark->block(current);
  else
    let_wait_for(current, first);
  streams_->used_on.push_back(current);
  streams_->has_several = true;
}

void StreamBuffer::note_current() {
  if (!streams_->owner) return;
  const auto current = current_stream(streams_->owner->device());
  if (!streams_->is_used_on(current)) streams_->used_on.push_back(current);
}

void StreamBuffer::join_uses() {
  if (!streams_ || streams_->used_on.empty()) return;
  const auto current = current_stream(streams_->used_on[0].device());
  UsingStreams left;  // of before a capture
  for (const auto& stream : streams_->used_on) {
    if (is_before_capture(stream, current))
      left.push_back(stream);
    else
      let_wait_for(current, stream);
  }
  if (left.size() < streams_->used_on.size()) left.push_back(current);
  streams_->used_on = std::move(left);
}

bool StreamBuffer::let_owner_wait() {
  const auto to = owner();
  if (!to) return false;
  bool has_waited = false;
  if (streams_->marked_on && streams_->is_last_use && *streams_->marked_on != *to) {
    streams_->mark->block(*to);
    has_waited = true;
  }
  for (const auto& stream : streams_->used_on) {
    let_wait_for(*to, stream);
    has_waited |= stream != *to;
  }
  streams_->used_on.clear();
  streams_->marked_on.reset();
  return has_waited;
}

void StreamBuffer::empty_streams() {
  if (let_owner_wait()) join_in_capture(*streams_->owner);
  streams_->owner.reset();
  streams_->held.clear();
}

void StreamBuffer::empty_streams_or_log() noexcept {
  try {
    return empty_streams();
  } catch (const std::exception& error) {
    log().error("memory goes back to a stream that cannot wait for its last use: {}", error.what());
  }
  streams_.reset();
}

}  // namespace fsdp
