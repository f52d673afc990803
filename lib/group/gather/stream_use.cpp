#include "group/gather/stream_use.hpp"

#include "base/side_stream.hpp"

namespace fsdp {

void StreamUse::record_launch(c10::Device device) {
  launched_on_.reset();
  used_on_.reset();
  if (!SideStream::exists_on(device)) return;
  launched_on_ = current_stream(device);
  record(launched_, *launched_on_);
}

void StreamUse::wait_before_use() {
  if (!launched_on_) return;
  used_on_ = current_stream(launched_on_->device());
  if (*launched_on_ != *used_on_) launched_->block(*used_on_);
}

bool StreamUse::joins_in_capture(bool unknown) {
  if (!launched_on_ || !is_capturing(*launched_on_).value_or(unknown)) return false;
  wait_before_use();
  return true;
}

void StreamUse::wait_before_free() const {
  if (!launched_on_ || !used_on_ || *launched_on_ == *used_on_) return;
  let_wait_for_current(*launched_on_);
  join_in_capture(*launched_on_);
}

void StreamUse::move_to_current() {
  if (used_on_) used_on_ = current_stream(used_on_->device());
}

}  // namespace fsdp
