#pragma once

namespace fsdp {

/// A lock of the host language that a thread may hold when one of its operators has to wait for parameters, and
/// that threads which complete collectives may need: Python's, which __torch_dispatch__ holds.
struct HostLock {
  void* (*release)();       ///< null: the thread does not hold it
  void (*acquire)(void*);   ///< what `release` returned
  void* (*ensure)();        ///< takes it, unless the thread holds it
  void (*let_go)(void*);    ///< of what `ensure` has taken, which it returned
};

/// Sets the process's one host lock; null, as by default: none. Call it before the first operator.
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

/// While it lives, the thread holds the lock: once around many calls of the host language.
class WithHostLock {
 public:
  WithHostLock();
  ~WithHostLock();
  WithHostLock(const WithHostLock&) = delete;
  WithHostLock& operator=(const WithHostLock&) = delete;

 private:
  void* taken_;
};

}  // namespace fsdp
