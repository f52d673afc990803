#include "late_allocator.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "late_capture.hpp"
#include "late_streams.hpp"

namespace fsdp::test {
namespace {

constexpr size_t kAlignment = 512;

constexpr int kNoPool = 0;

struct Block {
  void* memory = nullptr;
  size_t bytes = 0;
  c10::DeviceIndex device = 0;
  StreamHandle stream = nullptr;
  int pool = kNoPool;
  int era = 0;
  std::set<StreamHandle> users = {};                         // other streams
  std::vector<std::shared_ptr<StreamEvent>> behind_users = {};  // once it is given back
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
  void record(const c10::DataPtr& data, StreamHandle stream) {
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard lock(mutex_);
    if (block == nullptr || data.get_deleter() != &give_back || block->stream == stream) return;
    block->users.insert(stream);
    note_recorded(block->device);
  }
  void open(int pool) {
    std::lock_guard lock(mutex_);
    pools_.insert(pool);
  }
  void close(int pool) {
    std::lock_guard lock(mutex_);
    pools_.erase(pool);
    drop_free(pool);
  }
  void forget() {
    std::lock_guard lock(mutex_);
    for (auto* block : std::exchange(used_elsewhere_, {})) release(block);
    drop_free(std::nullopt);
    ++era_;
  }

 private:
  using Key = std::tuple<int, StreamHandle, size_t>;
  using Owner = std::pair<int, StreamHandle>;

  Block* take(size_t bytes, c10::DeviceIndex device, StreamHandle stream) {
    auto& streams = late_streams(device);
    const auto capture = streams.capture_of(stream);
    const int pool = capture ? capture->pool() : kNoPool;
    std::lock_guard lock(mutex_);
    look_for_users();
    poison_freed({pool, stream});
    auto& free = free_[Key(pool, stream, bytes)];
    if (!free.empty()) {
      auto* block = free.back();
      free.pop_back();
      return block;
    }
    void* memory = std::aligned_alloc(kAlignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, kPoison, bytes);
    return new Block{
        .memory = memory, .bytes = bytes, .device = device, .stream = stream, .pool = pool, .era = era_};
  }

  /// What is allocated now may lie in any of them, and be written behind what the stream has queued so far. (Not when they
  /// are freed: until a stream allocates, it may be let wait for whoever still uses them.)
  void poison_freed(Owner owner) {
    for (const auto* block : std::exchange(freed_[owner], {}))
      HostStreams::enqueue(owner.second,
                           [memory = block->memory, bytes = block->bytes] { std::memset(memory, kPoison, bytes); });
  }

  /// Those whose other users are done are free. As CUDA's, it asks no stream while one is captured.
  void look_for_users() {
    std::erase_if(used_elsewhere_, [&](Block* block) {
      auto& streams = late_streams(block->device);
      if (streams.is_capturing()) return false;
      for (const auto user : std::exchange(block->users, {})) block->behind_users.push_back(streams.record(user));
      if (!std::ranges::all_of(block->behind_users, &StreamEvent::is_done)) return false;
      block->behind_users.clear();
      put_back(block);
      return true;
    });
  }

  void put_back(Block* block) {
    freed_[{block->pool, block->stream}].push_back(block);
    free_[Key(block->pool, block->stream, block->bytes)].push_back(block);
  }

  /// Of a graph that is gone, or of all.
  void drop_free(std::optional<int> pool) {
    std::erase_if(freed_, [&](const auto& entry) { return !pool || entry.first.first == *pool; });
    std::erase_if(free_, [&](auto& entry) {
      if (pool && std::get<0>(entry.first) != *pool) return false;
      for (auto* block : entry.second) release(block);
      return true;
    });
  }

  static void give_back(void* context);

  static void release(Block* block) {
    std::memset(block->memory, kPoison, block->bytes);
    std::free(block->memory);
    delete block;
  }

  std::mutex mutex_;
  std::map<Key, std::vector<Block*>> free_;
  std::map<Owner, std::vector<const Block*>> freed_;  // since their stream has allocated
  std::vector<Block*> used_elsewhere_;                // given back, but for streams that are not their own
  std::set<int> pools_ = {kNoPool};
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
  if (block->era != all.era_ || !all.pools_.contains(block->pool)) return release(block);
  if (!block->users.empty())
    all.used_elsewhere_.push_back(block);
  else
    all.put_back(block);
  all.look_for_users();
}

const bool is_registered = [] {
  c10::SetAllocator(kLate, &late_allocator());
  return true;
}();

}  // namespace

c10::Allocator& late_allocator() { return allocator(); }
void record_late_stream(const c10::DataPtr& data, c10::Stream stream) {
  allocator().record(data, handle_of(stream));
}
void open_late_pool(int pool) { allocator().open(pool); }
void close_late_pool(int pool) { allocator().close(pool); }
void forget_late_memory() { allocator().forget(); }

}  // namespace fsdp::test
