#include <c10/core/StreamGuard.h>

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
  // Nothing is to wait for what has just begun to be copied or all-reduced.
  const bool is_queued = !reductions_.empty() && reductions_.back().is_beside();
  const size_t stays = limit - 1 + (has_all_reduce(group) || is_queued ? 1 : 0);
  while (reductions_.size() > stays) {
    // Taken out first: hooks on gradients are a user's code.
    auto oldest = std::move(reductions_.front());
    reductions_.erase(reductions_.begin());
    oldest.finish();
  }
}

bool RootContext::has_reduction_in_turn(const ParamGroup& group) const {
  return std::any_of(reductions_.begin(), reductions_.end(), [&](const auto& reduction) {
    return &reduction.group() == &group && !reduction.is_beside();
  });
}

void RootContext::finish_reductions() {
  for (auto& reduction : reductions_) reduction.finish();
  drop_reductions(nullptr);
}

/// Of one group; null: all of them. The current stream goes on behind what they have queued, as their memory is free then.
void RootContext::drop_reductions(const ParamGroup* of) {
  comm_ctx_.join_reductions();
  std::erase_if(reductions_, [&](const auto& reduction) { return of == nullptr || &reduction.group() == of; });
}

size_t RootContext::reduction_inputs() const {
  const auto under_way = std::count_if(reductions_.begin(), reductions_.end(),
                                       [](const auto& reduction) { return reduction.holds_inputs(); });
  return static_cast<size_t>(under_way) + postponed_.size();
}

bool RootContext::free_oldest_reduction_input() {
  if (reduction_inputs() > 0 && reduction_inputs() == postponed_.size()) launch_oldest_postponed();
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
