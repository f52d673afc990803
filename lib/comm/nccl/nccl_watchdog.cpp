#include "comm/nccl/nccl_watchdog.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace fsdp {

struct NcclWatchdog::State {
  std::mutex mutex;
  std::condition_variable stopped;
  std::vector<Watched*> groups;
  bool is_stopped = false;
};

NcclWatchdog::NcclWatchdog(std::chrono::milliseconds interval) : state_(std::make_shared<State>()) {
  thread_ = std::thread([state = state_, interval] {
    std::vector<at::Tensor> unused;
    std::unique_lock lock(state->mutex);
    while (!state->stopped.wait_for(lock, interval, [&] { return state->is_stopped; })) {
      for (Watched* group : state->groups) group->look(unused);
      if (unused.empty()) continue;
      lock.unlock();
      unused.clear();
      lock.lock();
    }
  });
}

NcclWatchdog::~NcclWatchdog() {
  {
    std::lock_guard lock(state_->mutex);
    state_->is_stopped = true;
  }
  state_->stopped.notify_all();
  // A tensor that the thread let go of may have been the last to hold the groups' owner.
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();
  else
    thread_.join();
}

void NcclWatchdog::add(Watched& group) {
  std::lock_guard lock(state_->mutex);
  state_->groups.push_back(&group);
}

void NcclWatchdog::remove(Watched& group) {
  std::lock_guard lock(state_->mutex);
  std::erase(state_->groups, &group);
}

}  // namespace fsdp
