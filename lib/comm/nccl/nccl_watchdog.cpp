#include "comm/nccl/nccl_watchdog.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "base/first_line.hpp"
#include "base/log.hpp"

namespace fsdp {

namespace {

/// How long the end of the process waits for looks that are under way.
constexpr auto kExitPatience = std::chrono::seconds(1);

/// Looks at the group, and logs an error of that: a thread without a handler would end the process.
void look_at(Watched& group, std::vector<at::Tensor>& unused) noexcept {
  try {
    group.look(unused);
  } catch (const std::exception& error) {
    log().warn("a look at the state of NCCL failed: {}", first_line(error.what()));
  }
}

}  // namespace

struct NcclWatchdog::State {
  std::timed_mutex mutex;
  std::condition_variable_any stopped;
  std::vector<Watched*> groups;
  bool is_stopped = false;

  void stop(std::unique_lock<std::timed_mutex> lock) {
    is_stopped = true;
    lock.unlock();
    stopped.notify_all();
  }
};

/// All watchdogs of the process. Never destroyed, as threads may outlive static objects.
struct NcclWatchdog::All {
  static All& get() {
    static All* all = new All;
    return *all;
  }

  void add(const std::shared_ptr<State>& state) {
    std::lock_guard lock(mutex);
    // Registered behind what the device's library has by now, so that it runs before that.
    if (!std::exchange(is_registered, true)) std::atexit([] { get().stop(); });
    std::erase_if(states, [](const auto& known) { return known.expired(); });
    states.push_back(state);
  }

  void stop() {
    std::lock_guard lock(mutex);
    const auto end = std::chrono::steady_clock::now() + kExitPatience;
    for (const auto& known : states) {
      const auto state = known.lock();
      if (!state) continue;
      if (std::unique_lock looking(state->mutex, std::defer_lock); looking.try_lock_until(end)) state->stop(std::move(looking));
    }
  }

  std::mutex mutex;
  std::vector<std::weak_ptr<State>> states;
  bool is_registered = false;
};

NcclWatchdog::NcclWatchdog(std::chrono::milliseconds interval) : state_(std::make_shared<State>()) {
  All::get().add(state_);
  thread_ = std::thread([state = state_, interval] {
    std::vector<at::Tensor> unused;
    std::unique_lock lock(state->mutex);
    while (!state->stopped.wait_for(lock, interval, [&] { return state->is_stopped; })) {
      for (Watched* group : state->groups) look_at(*group, unused);
      if (unused.empty()) continue;
      lock.unlock();
      unused.clear();
      lock.lock();
    }
  });
}

NcclWatchdog::~NcclWatchdog() {
  state_->stop(std::unique_lock(state_->mutex));
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
