#pragma once

#include <cstdint>

namespace fsdp::test {

/// While it lives, the n-th allocation of CPU tensors' memory on this thread fails, as if there were no more; those of no bytes do not
/// count. Threads are ranks: it fails on one of them alone.
class FailingAllocation {
 public:
  explicit FailingAllocation(int64_t n);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  bool has_failed() const;
};

}  // namespace fsdp::test
