#include <algorithm>

#include "group/root_context.hpp"

// How many packed gradients are alive together, in one root or in several that share.
namespace fsdp {

/// By default one reduction under way at a time (and one all-reduce behind it): two groups' gradients
/// are never packed together.
void RootContext::make_room_for_reduction(const ParamGroup& group) {
  const auto& config = group.reduction();
  const auto limit = static_cast<size_t>(config.max_input_buffers);
  if (sharers_) {
    // What other roots have left under way goes first: they are further back in time.
    size_t alive = reduction_inputs();
    for (const auto& sharer : *sharers_)
      if (const auto other = sharer.lock(); other && other.get() != this) {
        std::lock_guard lock(other->mutex_);
        alive += other->reduction_inputs();
        while (alive >= limit && other->free_oldest_reduction_input()) --alive;
      }
    while (alive >= limit && free_oldest_reduction_input()) --alive;
  }
  while (reduction_inputs() >= limit && free_oldest_reduction_input()) {
  }
  const size_t stays = limit - 1 + (has_all_reduce(group) ? 1 : 0);
  while (reductions_.size() > stays) {
    reductions_.front().finish();
    reductions_.erase(reductions_.begin());
  }
}

size_t RootContext::reduction_inputs() const {
  return static_cast<size_t>(std::count_if(reductions_.begin(), reductions_.end(),
                                           [](const auto& reduction) { return reduction.holds_inputs(); }));
}

bool RootContext::free_oldest_reduction_input() {
  for (auto& reduction : reductions_)
    if (reduction.holds_inputs()) {
      reduction.advance();
      return true;
    }
  return false;
}

void RootContext::share_reduction_buffers(std::span<const std::shared_ptr<RootContext>> roots) {
  auto sharers = std::make_shared<std::vector<std::weak_ptr<RootContext>>>(roots.begin(), roots.end());
  for (const auto& root : roots) {
    std::lock_guard lock(root->mutex_);
    if (root->sharers_)
      std::erase_if(*root->sharers_, [&](const auto& known) { return known.lock() == root; });
    root->sharers_ = sharers;
  }
}

}  // namespace fsdp
