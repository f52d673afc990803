#pragma once

#include <mutex>

#include "dispatch/host_lock.hpp"

namespace fsdp {

/// A root's lock: of one thread at a time, which may take it again.
///
/// A thread that has to wait for it lets go of the host lock (Python's) meanwhile. Whoever holds the root's may want that
/// one, to show parameters or to run a user's collective, so the two may be asked for in either order.
class RootMutex {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    const WithoutHostLock may_wait;
    mutex_.lock();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::recursive_mutex mutex_;
};

}  // namespace fsdp
