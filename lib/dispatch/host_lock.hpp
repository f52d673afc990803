#pragma once

namespace fsdp {

/// A lock of the host language that a thread may hold when one of its operators has to wait for parameters, and
/// that threads which complete collectives may need: Python's, which __torch_dispatch__ holds.
struct HostLock {
  void* (*release)();       ///< null: the thread does not hold it
  void (*acquire)(void*);  ///< what `release` returned
};

/// Before the first operator. There is one for the process; null by default.
void set_host_lock(const HostLock* lock);

/// While it lives, the thread does not hold the lock.
class WithoutHostLock {
 public:
  WithoutHostLock();
  ~WithoutHostLock();
  WithoutHostLock(const WithoutHostLock&) = delete;
  WithoutHostLock& operator=(const WithoutHostLock&) = delete;

 private:
  void* held_;
};

}  // namespace fsdp
