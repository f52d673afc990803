#include "group/gather/unsharded_memory.hpp"

#include "base/side_stream.hpp"

namespace fsdp {

void UnshardedMemory::note_launch(const AllGather& gather, bool owns_input) {
  launched_.begin(gather.local.device());
  if (owns_input) launched_.hold(gather.local);
  launched_.hold(gather.tail);
  launched_.record_ready();
  if (gather.unsharded.defined() && !bytes().defined()) buffer_.begin(launched_);
}

bool UnshardedMemory::joins_in_capture(bool unknown) const {
  const auto launched_on = launched_.owner();
  if (!launched_on || !is_capturing(*launched_on).value_or(unknown)) return false;
  launched_.wait_until_ready();
  return true;
}

void UnshardedMemory::release() {
  if (keeps_ || is_slot_) buffer_.join_uses();
  if (!keeps_ || is_slot_) return buffer_.reset();
  buffer_.record_ready();
  kept_ = std::move(buffer_);
}

}  // namespace fsdp
