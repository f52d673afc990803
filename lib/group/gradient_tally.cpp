#include "group/gradient_tally.hpp"

#include "group/param_group.hpp"

namespace fsdp {

void GradientTally::note(size_t index) {
  if (has_[index]) return;
  has_[index] = true;
  ++count_;
}

bool GradientTally::is_complete(const ParamGroup& group) const {
  // Ranks may use different parameters then: no rank may start a reduction because its own are
  // complete, or the order of collectives would depend on the data.
  if (group.reduction().reduces_unused_params) return false;
  if (count_ == group.trainable_count()) return true;
  return count_ == expected_count_ && has_ == expected_;
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
