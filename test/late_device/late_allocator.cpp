#include "late_allocator.hpp"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "late_streams.hpp"

namespace fsdp::test {
namespace {

constexpr size_t kAlignment = 512;

struct Block {
  void* memory = nullptr;
  size_t bytes = 0;
  c10::DeviceIndex device = 0;
  StreamHandle stream = nullptr;
  int era = 0;
};

/// All of it is one lock's: streams and devices do not race in here.
class LateAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_late_device();
    if (bytes == 0) return {nullptr, late(index)};
    const auto stream = late_streams(index).current();
    // Few sizes, so that memory given back is soon somebody else's.
    auto* block = take(std::bit_ceil(std::max(bytes, kAlignment)), index, stream);
    return {block->memory, block, &give_back, late(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue_late(current_late_device(), "a copy", [=] { std::memcpy(to, from, bytes); });
  }
  void forget() {
    std::lock_guard lock(mutex_);
    for (auto& [key, blocks] : free_)
      for (auto* block : blocks) release(block);
    free_.clear();
    freed_.clear();
    ++era_;
  }

 private:
  using Key = std::pair<StreamHandle, size_t>;

  Block* take(size_t bytes, c10::DeviceIndex device, StreamHandle stream) {
    std::lock_guard lock(mutex_);
    poison_freed(stream);
    auto& free = free_[Key(stream, bytes)];
    if (!free.empty()) {
      auto* block = free.back();
      free.pop_back();
      return block;
    }
    void* memory = std::aligned_alloc(kAlignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, kPoison, bytes);
    return new Block{.memory = memory, .bytes = bytes, .device = device, .stream = stream, .era = era_};
  }

  /// What is allocated now may lie in any of them, and be written behind what the stream has queued so far. (Not when they
  /// are freed: until a stream allocates, it may be let wait for whoever still uses them.)
  void poison_freed(StreamHandle stream) {
    for (const auto* block : std::exchange(freed_[stream], {}))
      HostStreams::enqueue(stream,
                           [memory = block->memory, bytes = block->bytes] { std::memset(memory, kPoison, bytes); });
  }

  static void give_back(void* context);

  static void release(Block* block) {
    std::free(block->memory);
    delete block;
  }

  std::mutex mutex_;
  std::map<Key, std::vector<Block*>> free_;
  std::map<StreamHandle, std::vector<const Block*>> freed_;  // since their stream has allocated
  int era_ = 0;
};

LateAllocator& allocator() {
  static LateAllocator instance;
  return instance;
}

void LateAllocator::give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& all = allocator();
  std::lock_guard lock(all.mutex_);
  if (block->era != all.era_) return release(block);
  all.freed_[block->stream].push_back(block);
  all.free_[Key(block->stream, block->bytes)].push_back(block);
}

const bool is_registered = [] {
  c10::SetAllocator(kLate, &late_allocator());
  return true;
}();

}  // namespace

c10::Allocator& late_allocator() { return allocator(); }
void forget_late_memory() { allocator().forget(); }

}  // namespace fsdp::test
