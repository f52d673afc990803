#include "late_pinned.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "late_allocator.hpp"

namespace fsdp::test {
namespace {

struct PinnedBlock {
  PinnedBlock(void* memory, size_t bytes) : memory(memory), bytes(bytes) {}
  ~PinnedBlock() {
    std::memset(memory, kPoison, bytes);
    std::free(memory);
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  void* const memory;
  const size_t bytes;
};

std::mutex pinned_mutex;
std::map<const char*, std::shared_ptr<PinnedBlock>>& pinned_blocks() {
  static auto& all = *new std::map<const char*, std::shared_ptr<PinnedBlock>>;
  return all;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t kAlignment = 64;
    void* memory = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, kPoison, bytes);
    std::lock_guard lock(pinned_mutex);
    pinned_blocks()[static_cast<char*>(memory)] = std::make_shared<PinnedBlock>(memory, bytes);
    return {memory, memory, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void give_back(void* memory) {
    std::shared_ptr<PinnedBlock> block;  // goes without the lock
    std::lock_guard lock(pinned_mutex);
    const auto found = pinned_blocks().find(static_cast<char*>(memory));
    block = std::move(found->second);
    pinned_blocks().erase(found);
  }
};

}  // namespace

c10::Allocator& late_pinned_allocator() {
  static PinnedAllocator allocator;
  return allocator;
}

std::shared_ptr<void> pinned_block_of(const void* memory) {
  const auto* place = static_cast<const char*>(memory);
  std::lock_guard lock(pinned_mutex);
  auto found = pinned_blocks().upper_bound(place);
  if (found == pinned_blocks().begin()) return nullptr;
  --found;
  return place < found->first + found->second->bytes ? found->second : nullptr;
}

namespace {
std::atomic<int64_t> questions{0};
}  // namespace

bool is_pinned_for_late(const void* memory) {
  ++questions;
  return pinned_block_of(memory) != nullptr;
}

int64_t questions_whether_pinned() { return questions; }

}  // namespace fsdp::test
