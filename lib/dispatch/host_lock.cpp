#include "dispatch/host_lock.hpp"

#include <atomic>

namespace fsdp {

namespace {
std::atomic<const HostLock*> host_lock = nullptr;
}

void set_host_lock(const HostLock* lock) { host_lock = lock; }

WithoutHostLock::WithoutHostLock() : held_(host_lock.load() != nullptr ? host_lock.load()->release() : nullptr) {}

WithoutHostLock::~WithoutHostLock() {
  if (held_ != nullptr) host_lock.load()->acquire(held_);
}

WithHostLock::WithHostLock() : taken_(host_lock.load() != nullptr ? host_lock.load()->ensure() : nullptr) {}

WithHostLock::~WithHostLock() {
  if (const auto* lock = host_lock.load()) lock->let_go(taken_);
}

}  // namespace fsdp
