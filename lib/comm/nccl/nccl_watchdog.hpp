#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace fsdp {

/// What a watchdog looks after.
class Watched {
 public:
  virtual ~Watched() = default;
  /// Waits for nothing but an answer of the store. Adds the tensors that are needed no more to `unused`, to be let go
  /// of by the caller, without locks: memory may have owners that do anything when it goes.
  virtual void look(std::vector<at::Tensor>& unused) = 0;
};

/// A thread that looks at all groups of one world again and again, until the process begins to end: then devices and libraries
/// go, with worlds alive that nobody has destroyed. Thread-safe.
class NcclWatchdog {
 public:
  explicit NcclWatchdog(std::chrono::milliseconds interval);
  ~NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  void add(Watched& group);
  /// Removes a group: when this returns the group is not being looked at, and will not be.
  void remove(Watched& group);

 private:
  struct State;
  struct All;
  std::shared_ptr<State> state_;  // the thread's too
  std::thread thread_;
};

}  // namespace fsdp
