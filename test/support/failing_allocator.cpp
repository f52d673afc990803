#include "support/failing_allocator.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace fsdp::test {
namespace {

constexpr int64_t kNone = -1;
thread_local int64_t left = kNone;  // allocations until one fails; 0: it has

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > 0 && left > 0 && --left == 0) TORCH_CHECK(false, "no memory for ", bytes, " bytes, as the test has it");
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetDefaultCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

void install() {
  static Allocator allocator;
  [[maybe_unused]] static const bool is_in_front = [] {
    c10::SetAllocator(c10::DeviceType::CPU, &allocator, /*priority=*/255);
    return true;
  }();
}

}  // namespace

FailingAllocation::FailingAllocation(int64_t n) {
  install();
  left = n;
}
FailingAllocation::~FailingAllocation() { left = kNone; }
bool FailingAllocation::has_failed() const { return left == 0; }

}  // namespace fsdp::test
