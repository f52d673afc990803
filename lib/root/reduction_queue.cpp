#include "root/reduction_queue.hpp"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <mutex>

#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/reduce_call.hpp"

namespace fsdp {

bool ReductionQueue::has_in_turn(const ParamGroup& group) const {
  return std::ranges::any_of(under_way_, [&](const auto& reduction) {
    return &reduction.group() == &group && reduction.order() == ReduceOrder::kInTurn;
  });
}

/// By default one reduction under way at a time (and one all-reduce behind it): two groups' gradients are never packed
/// together.
void ReductionQueue::make_room(const ParamGroup& group) {
  const auto limit = static_cast<size_t>(group.options().reduce.max_input_buffers);
  if (sharers_) {
    // What other roots have left under way goes first: they are further back in time.
    size_t alive = inputs();
    for (const auto& sharer : *sharers_)
      if (const auto other = sharer.lock(); other && other.get() != this) {
        std::lock_guard lock(other->mutex_);
        alive += other->inputs();
        while (alive >= limit && other->free_oldest_input()) --alive;
      }
    while (alive >= limit && free_oldest_input()) --alive;
  }
  while (inputs() >= limit && free_oldest_input()) {
  }
  // Nothing is to wait for what has just begun to be copied or all-reduced.
  const bool is_queued = !under_way_.empty() && under_way_.back().order() == ReduceOrder::kOnStreams;
  const size_t stays = limit - 1 + (has_all_reduce(group) || is_queued ? 1 : 0);
  while (under_way_.size() > stays) {
    // Taken out first: hooks on gradients are a user's code.
    auto oldest = std::move(under_way_.front());
    under_way_.erase(under_way_.begin());
    oldest.finish(hooks_);
  }
}

void ReductionQueue::launch(ReduceJob reduction) {
  reduction.start();
  under_way_.push_back(std::move(reduction));
}

void ReductionQueue::launch_or_postpone(ReduceJob reduction, Waits waits, const ParamGroup* until) {
  if (waits == Waits::kNot && postponed_.empty()) return launch(std::move(reduction));
  const auto device = reduction.group().parts().config.device;
  postponed_.push_back(
      {.reduction = std::move(reduction), .waits = waits, .until = until, .stream = current_stream(device)});
}

void ReductionQueue::launch_oldest_postponed() {
  auto oldest = std::move(postponed_.front());
  postponed_.pop_front();
  const c10::StreamGuard stream(oldest.stream);
  launch(std::move(oldest.reduction));
}

void ReductionQueue::launch_behind_use(std::span<ParamGroup* const> used) {
  while (!postponed_.empty()) {
    const auto& oldest = postponed_.front();
    if (oldest.waits == Waits::kForNextBackward) return;
    if (oldest.waits == Waits::kForUse && std::find(used.begin(), used.end(), oldest.until) == used.end()) return;
    launch_oldest_postponed();
  }
}

void ReductionQueue::launch_behind_backward() {
  for (auto& postponed : postponed_)
    if (postponed.waits == Waits::kForNextBackward) postponed.waits = Waits::kNot;
  launch_behind_use({});
}

void ReductionQueue::launch_postponed() {
  while (!postponed_.empty()) launch_oldest_postponed();
}

size_t ReductionQueue::inputs() const {
  const auto under_way =
      std::ranges::count_if(under_way_, [](const auto& reduction) { return reduction.holds_inputs(); });
  return static_cast<size_t>(under_way) + postponed_.size();
}

bool ReductionQueue::free_oldest_input() {
  if (inputs() > 0 && inputs() == postponed_.size()) launch_oldest_postponed();
  for (auto& reduction : under_way_)
    if (reduction.holds_inputs()) {
      reduction.free_inputs();
      return true;
    }
  return false;
}

void ReductionQueue::free_inputs() {
  for (auto& reduction : under_way_) reduction.free_inputs();
}

void ReductionQueue::finish() {
  launch_postponed();
  for (auto& reduction : under_way_) reduction.finish(hooks_);
  drop(nullptr);
}

void ReductionQueue::drop(const ParamGroup* of) {
  std::erase_if(postponed_, [&](const auto& postponed) { return of == nullptr || &postponed.reduction.group() == of; });
  for (auto& postponed : postponed_)
    if (postponed.until == of) postponed.waits = Waits::kNot;
  comm_ctx_.join_reductions();
  std::erase_if(under_way_, [&](const auto& reduction) { return of == nullptr || &reduction.group() == of; });
}

void ReductionQueue::share(std::span<const std::shared_ptr<ReductionQueue>> queues) {
  auto sharers = std::make_shared<Sharers>(queues.begin(), queues.end());
  for (const auto& queue : queues) {
    std::lock_guard lock(queue->mutex_);
    if (queue->sharers_)
      std::erase_if(*queue->sharers_, [&](const auto& known) { return known.lock() == queue; });
    queue->sharers_ = sharers;
  }
}

}  // namespace fsdp
