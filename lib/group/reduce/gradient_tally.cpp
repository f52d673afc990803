#include "group/reduce/gradient_tally.hpp"

namespace fsdp {

void GradientTally::note(size_t index) {
  if (has_[index]) return;
  has_[index] = true;
  ++count_;
}

bool GradientTally::is_complete(size_t trainable) const {
  return count_ == trainable || (count_ == expected_count_ && has_ == expected_);
}

void GradientTally::end_backward() {
  if (count_ > 0) {
    expected_ = has_;
    expected_count_ = count_;
  }
  has_.assign(has_.size(), false);
  count_ = 0;
  is_reduced = false;
}

void GradientTally::reset() {
  end_backward();
  expected_.clear();
  expected_count_ = 0;
}

}  // namespace fsdp
