#include "trace/desync/watch_mailbox.hpp"

#include <utility>

namespace fsdp {

void WatchMailbox::post_step(CollectiveLog::Position step) {
  {
    std::lock_guard lock(mutex_);
    steps_.push_back(step);
  }
  wake_.notify_one();
}

void WatchMailbox::post_beginnings(std::vector<Beginning> beginnings) {
  {
    std::lock_guard lock(mutex_);
    beginnings_ = std::move(beginnings);
  }
  wake_.notify_one();
}

bool WatchMailbox::end(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  state_ = transition(state_, WatchEvent::kAsked);
  wake_.notify_one();
  return gone_.wait_for(lock, patience, [this] { return state_ == WatchState::kHasEnded; });
}

bool WatchMailbox::await(std::chrono::milliseconds pause) {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, pause,
                 [this] { return state_ != WatchState::kRuns || !steps_.empty() || !beginnings_.empty(); });
  return state_ == WatchState::kRuns;
}

std::vector<CollectiveLog::Position> WatchMailbox::take_steps() {
  std::lock_guard lock(mutex_);
  return std::exchange(steps_, {});
}

std::vector<Beginning> WatchMailbox::take_beginnings() {
  std::lock_guard lock(mutex_);
  return std::exchange(beginnings_, {});
}

void WatchMailbox::note_returned() {
  std::lock_guard lock(mutex_);
  state_ = transition(state_, WatchEvent::kReturned);
  gone_.notify_all();
}

}  // namespace fsdp
