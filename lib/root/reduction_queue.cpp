#include "root/reduction_queue.hpp"

#include <algorithm>
#include <mutex>

#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/reduce_call.hpp"
#include "schedule/reduce_order.hpp"

namespace fsdp {

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
  const bool is_queued = started_ > 0 && started().back().driver() == ReduceDriver::kStreams;
  const size_t stays = limit - 1 + (has_all_reduce(group) || is_queued ? 1 : 0);
  while (started_ > stays) {
    // Taken out first: hooks on gradients are a user's code.
    auto oldest = std::move(jobs_.front());
    jobs_.erase(jobs_.begin());
    --started_;
    oldest.finish(hooks_);
  }
}

void ReductionQueue::pack(ParamGroup& group) {
  // Of one group they go the same way.
  const bool is_behind_one = std::ranges::any_of(jobs_, [&](const ReduceJob& job) {
    return &job.group() == &group && job.driver() == ReduceDriver::kHost;
  });
  jobs_.emplace_back(group, is_behind_one);
}

void ReductionQueue::start_oldest() {
  try {
    jobs_[started_].start();
  } catch (...) {
    jobs_.erase(jobs_.begin() + static_cast<ptrdiff_t>(started_));
    throw;
  }
  ++started_;
}

const ParamGroup* ReductionQueue::start_behind(const ParamGroup& gathered) {
  auto& last = jobs_.back();
  if (!last.hold_back_by(gathered)) return &last.group();
  start_oldest();
  return nullptr;
}

size_t ReductionQueue::inputs() const {
  const auto holding = std::count_if(jobs_.begin(), jobs_.begin() + static_cast<ptrdiff_t>(started_),
                                     [](const ReduceJob& job) { return job.holds_inputs(); });
  return static_cast<size_t>(holding) + jobs_.size() - started_;
}

bool ReductionQueue::free_oldest_input() {
  const auto oldest = [&] { return std::ranges::find_if(started(), &ReduceJob::holds_inputs); };
  if (oldest() == started().end() && started_ < jobs_.size()) {
    order_.note_started();
    start_oldest();
  }
  const auto holder = oldest();
  if (holder == started().end()) return false;
  holder->free_inputs();
  return true;
}

void ReductionQueue::free_inputs() {
  for (auto& job : started()) job.free_inputs();
}

void ReductionQueue::finish() {
  order_.clear();
  while (started_ < jobs_.size()) start_oldest();
  for (auto& job : started()) job.finish(hooks_);
  drop(nullptr);
}

void ReductionQueue::drop(const ParamGroup* of) {
  const auto goes = [&](const ReduceJob& job) { return of == nullptr || &job.group() == of; };
  if (of == nullptr)
    order_.clear();
  else
    order_.drop(of->identity().id);
  jobs_.erase(std::remove_if(jobs_.begin() + static_cast<ptrdiff_t>(started_), jobs_.end(), goes), jobs_.end());
  comm_ctx_.join_reductions();
  started_ -= static_cast<size_t>(std::ranges::count_if(started(), goes));
  std::erase_if(jobs_, goes);
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
