#pragma once

#include <memory>
#include <thread>

#include "group/schedule_watcher.hpp"

namespace fsdp {

/// A ScheduleWatcher with its thread, which runs while this lives. In a child process that a fork has
/// made, where no thread came along, it only goes away.
class ScheduleWatch {
 public:
  ScheduleWatch(std::shared_ptr<ScheduleLog> log, ScheduleBoard board, WatchTimes times);
  ~ScheduleWatch();
  ScheduleWatch(const ScheduleWatch&) = delete;
  ScheduleWatch& operator=(const ScheduleWatch&) = delete;

  ScheduleWatcher* operator->() const { return watcher_.get(); }

 private:
  std::shared_ptr<ScheduleWatcher> watcher_;  // the thread holds it too: it may have to outlive this
  std::thread thread_;
  int process_;
};

}  // namespace fsdp
