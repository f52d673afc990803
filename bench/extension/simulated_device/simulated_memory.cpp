#include "extension/simulated_device/simulated_memory.hpp"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "extension/simulated_device/simulated_device.hpp"

namespace fsdp::bench {
namespace {

std::atomic<int64_t> live_bytes = 0, peak_bytes = 0;

struct Block {
  c10::DataPtr memory;
  int64_t bytes;
};

void give_back(void* block) {
  live_bytes -= static_cast<Block*>(block)->bytes;
  delete static_cast<Block*>(block);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kSimulated, 0);
    if (bytes == 0) return {nullptr, device};
    auto* block = new Block{c10::GetCPUAllocator()->allocate(bytes), static_cast<int64_t>(bytes)};
    live_bytes += block->bytes;
    peak_bytes = std::max(peak_bytes.load(), live_bytes.load());
    return {block->memory.get(), block, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator& simulated_allocator() {
  static Allocator allocator;
  return allocator;
}

void resize_simulated(c10::StorageImpl& storage, size_t bytes) {
  auto memory = simulated_allocator().allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes()); kept > 0)
    std::memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

SimulatedMemory simulated_memory() { return {.live_bytes = live_bytes, .peak_bytes = peak_bytes}; }
void reset_simulated_peak() { peak_bytes = live_bytes.load(); }

}  // namespace fsdp::bench
