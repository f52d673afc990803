#include "group/gather/stream_use.hpp"

#include <algorithm>

#include "base/side_stream.hpp"

namespace fsdp {

void StreamUse::record_launch(c10::Device device) {
  launched_on_.reset();
  used_on_.clear();
  is_recorded_ = false;
  if (!SideStream::exists_on(device)) return;
  launched_on_ = current_stream(device);
  record(launched_, *launched_on_);
}

void StreamUse::wait_before_use() {
  if (!launched_on_) return;
  used_on_.assign(1, current_stream(launched_on_->device()));
  if (*launched_on_ != used_on_[0]) launched_->block(used_on_[0]);
}

bool StreamUse::joins_in_capture(bool unknown) {
  if (!launched_on_ || !is_capturing(*launched_on_).value_or(unknown)) return false;
  wait_before_use();
  return true;
}

void StreamUse::end_gather() {
  // Not into a graph: what it leaves readable may be used behind the capture.
  is_recorded_ = has_several_ && !used_on_.empty() && !is_capturing(used_on_[0]).value_or(false);
  if (is_recorded_) record(readable_, used_on_[0]);
  wait_before_free();
}

void StreamUse::let_current_use() {
  const auto stream = current_stream(used_on_[0].device());
  if (std::ranges::find(used_on_, stream) != used_on_.end() || is_before_capture(used_on_[0], stream)) return;
  // The first time this waits for more than it needs, so that programs with one stream record nothing.
  if (is_recorded_)
    readable_->block(stream);
  else
    let_wait_for(stream, used_on_[0]);
  used_on_.push_back(stream);
  has_several_ = true;
}

void StreamUse::wait_before_free() const {
  if (!launched_on_) return;
  for (const auto& stream : used_on_) let_wait_for(*launched_on_, stream);
  if (std::ranges::any_of(used_on_, [&](const auto& stream) { return stream != *launched_on_; }))
    join_in_capture(*launched_on_);
}

void StreamUse::let_current_wait_for_uses() const {
  if (used_on_.empty()) return;
  const auto current = current_stream(used_on_[0].device());
  for (const auto& stream : used_on_)
    if (!is_before_capture(stream, current)) let_wait_for(current, stream);
}

void StreamUse::move_to_current() {
  if (used_on_.empty()) return;
  used_on_.assign(1, current_stream(used_on_[0].device()));
  is_recorded_ = false;
}

}  // namespace fsdp
