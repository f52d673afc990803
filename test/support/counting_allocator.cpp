#include "support/counting_allocator.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace fsdp::test {
namespace {

struct Ledger {
  std::mutex mutex;
  std::unordered_map<void*, int64_t> bytes_at;
  std::vector<MemoryEvent> events;
  std::map<int64_t, int> sizes_at_start;
  int64_t live = 0;
  int64_t live_at_start = 0;
  int64_t peak = 0;
  bool is_recording = false;

  void add(void* address, int64_t bytes) {
    const std::lock_guard lock(mutex);
    bytes_at[address] = bytes;
    note(address, bytes);
  }

  void remove(void* address) {
    const std::lock_guard lock(mutex);
    const auto found = bytes_at.find(address);
    const int64_t bytes = found->second;
    bytes_at.erase(found);
    note(address, -bytes);
  }

 private:
  void note(void* address, int64_t bytes) {
    live += bytes;
    peak = std::max(peak, live);
    if (is_recording) events.push_back({reinterpret_cast<uintptr_t>(address), bytes});
  }
};

// Never destroyed: tensors in static storage are released after static destructors ran.
Ledger& ledger() {
  static auto* const instance = new Ledger;
  return *instance;
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* const address = inner_->raw_allocate(bytes);
    if (address != nullptr) ledger().add(address, static_cast<int64_t>(bytes));
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

 private:
  static void release(void* address) {
    if (address == nullptr) return;
    ledger().remove(address);
    c10::GetDefaultCPUAllocator()->raw_deallocate(address);
  }

  c10::Allocator* inner_;
};

}  // namespace

void install_counting_allocator() {
  static auto* const allocator = new CountingAllocator(c10::GetDefaultCPUAllocator());
  c10::SetAllocator(c10::DeviceType::CPU, allocator, /*priority=*/255);
}

int64_t live_bytes() {
  const std::lock_guard lock(ledger().mutex);
  return ledger().live;
}

void start_recording() {
  const std::lock_guard lock(ledger().mutex);
  ledger().sizes_at_start.clear();
  for (const auto& [address, bytes] : ledger().bytes_at) ++ledger().sizes_at_start[bytes];
  ledger().live_at_start = ledger().live;
  ledger().events.clear();
  ledger().events.reserve(1 << 16);
  ledger().peak = ledger().live;
  ledger().is_recording = true;
}

int64_t peak_bytes() {
  const std::lock_guard lock(ledger().mutex);
  return ledger().peak;
}

std::vector<MemoryEvent> recorded_events() {
  const std::lock_guard lock(ledger().mutex);
  return ledger().events;
}

int64_t allocated_bytes() {
  int64_t bytes = 0;
  for (const auto& event : recorded_events()) bytes += std::max<int64_t>(event.bytes, 0);
  return bytes;
}

std::map<int64_t, int> sizes_at_peak() {
  const std::lock_guard lock(ledger().mutex);
  auto sizes = ledger().sizes_at_start;
  int64_t live = ledger().live_at_start;
  for (const auto& event : ledger().events) {
    if (live == ledger().peak) break;
    live += event.bytes;
    sizes[std::abs(event.bytes)] += event.bytes > 0 ? 1 : -1;
  }
  std::erase_if(sizes, [](const auto& size) { return size.second == 0; });
  return sizes;
}

int64_t peak_of_sizes(std::span<const MemoryEvent> events, const std::set<int64_t>& sizes) {
  std::unordered_set<uintptr_t> counted;
  int64_t live = 0;
  int64_t peak = 0;
  for (const auto& event : events) {
    const bool counts = event.bytes > 0 ? sizes.contains(event.bytes) && counted.insert(event.address).second
                                        : counted.erase(event.address) > 0;
    if (counts) live += event.bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

}  // namespace fsdp::test
