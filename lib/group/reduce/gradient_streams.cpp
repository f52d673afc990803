#include "group/reduce/gradient_streams.hpp"

#include <algorithm>

#include "group/reduce/gradient_store.hpp"

namespace fsdp {

void GradientStreams::note_current(c10::Stream stream) {
  if (!to_wait_for_.empty() && to_wait_for_.back() == stream) return;
  if (std::ranges::find(to_wait_for_, stream) == to_wait_for_.end()) to_wait_for_.push_back(stream);
  if (!first_) first_ = stream;
  are_several_ |= *first_ != stream;
}

void GradientStreams::take(const GradientStore& store) {
  if (!first_) return;
  const auto current = current_stream(first_->device());
  for (const auto& stream : to_wait_for_) let_wait_for(current, stream);
  if (are_several_ || *first_ != current) store.record_use(current);
  drop();
}

void GradientStreams::end_backward(const GradientStore& store) {
  to_wait_for_.clear();
  if (!first_) return;
  const auto current = current_stream(first_->device());
  are_several_ |= *first_ != current;
  if (are_several_) store.record_use(current);
}

void GradientStreams::drop() {
  to_wait_for_.clear();
  first_.reset();
  are_several_ = false;
}

}  // namespace fsdp
