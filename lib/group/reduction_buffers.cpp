#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "group/root_context.hpp"

// How many packed gradients are alive together, in one root or in several that share; and which wait for an all-gather.
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
    // Taken out first: hooks on gradients may read parameters, and such a use may launch what was postponed.
    auto oldest = std::move(reductions_.front());
    reductions_.erase(reductions_.begin());
    oldest.finish();
  }
}

void RootContext::let_current_wait_for_reductions() {
  reduce_scatter_stream_.let_current_wait();
  post_reduce_stream_.let_current_wait();
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
  reduce_scatter_stream_.join();
  post_reduce_stream_.join();
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

// --- Reductions over a communicator of their own let an all-gather go first that is used soon: both share the network's
// bandwidth. In one queue it goes first by being launched first.

/// What is computed before its use is smaller than it is, so that is likely to be over before the gather. (What the
/// schedule knows are bytes; times would make ranks differ.)
bool RootContext::is_urgent(const ParamGroup& gathered) const {
  int64_t bytes_before = 0;
  // All before it are held, so it is among these.
  const auto ids = trace_->upcoming(held_.size() + 1);
  for (size_t i = 0; i < ids.size(); ++i) {
    // Behind the last gather there are only reductions, and waiting makes them later.
    if (ids[i] == gathered.id) return i + 1 < ids.size() && bytes_before < gathered.unsharded_bytes();
    if (const auto* group = find(ids[i])) bytes_before += group->unsharded_bytes();
  }
  return false;
}

/// gathered: in the room that the reduction's group has left; null: nothing.
void RootContext::launch_or_postpone(GradientReduction reduction, const ParamGroup* gathered) {
  const auto& group = reduction.group();
  // Groups over other ranks may have other bytes there, by which these would come to another order.
  const auto& ranks = group.config().mesh_info.shard_group;
  const bool all_alike = std::all_of(groups_.begin(), groups_.end(),
                                     [&](const auto* other) { return other->config().mesh_info.shard_group == ranks; });
  const bool waits =
      gathered != nullptr && group.reduction().uses_separate_group && all_alike && is_urgent(*gathered);
  if (!waits && postponed_.empty()) return launch(std::move(reduction));
  // Behind one that waits they keep their order.
  const auto device = group.config().device;
  postponed_.push_back({std::move(reduction), waits ? gathered : nullptr, current_stream(device)});
}

void RootContext::launch_oldest_postponed() {
  auto oldest = std::move(postponed_.front());
  postponed_.pop_front();
  const c10::StreamGuard stream(oldest.stream);
  launch(std::move(oldest.reduction));
}

/// Those that have waited for this use, and those behind them that wait for nothing else.
void RootContext::launch_postponed(std::span<ParamGroup* const> used) {
  while (!postponed_.empty()) {
    const auto* until = postponed_.front().until;
    if (until != nullptr && std::find(used.begin(), used.end(), until) == used.end()) return;
    launch_oldest_postponed();
  }
}

void RootContext::launch_all_postponed() {
  while (!postponed_.empty()) launch_oldest_postponed();
}

}  // namespace fsdp
