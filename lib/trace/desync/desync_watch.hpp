#pragma once

#include <memory>
#include <thread>

#include "trace/desync/desync_watcher.hpp"

namespace fsdp {

/// A DesyncWatcher with its thread, which runs while this lives. In a child process that a fork has
/// made, where no thread came along, it only goes away.
class DesyncWatch {
 public:
  DesyncWatch(std::shared_ptr<CollectiveLog> log, const DesyncBoard& board, WatchTimes times);
  ~DesyncWatch();
  DesyncWatch(const DesyncWatch&) = delete;
  DesyncWatch& operator=(const DesyncWatch&) = delete;

  DesyncWatcher* operator->() const { return watcher_.get(); }

 private:
  /// The thread returns, or has returned, in good time.
  bool has_ended();

  std::shared_ptr<DesyncWatcher> watcher_;  // the thread holds it too: it may have to outlive this
  std::thread thread_;
  int process_;
};

}  // namespace fsdp
