// Only in builds with CUDA.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "comm/comm_memory.hpp"
#include "comm/nccl/comm_streams.hpp"
#include "comm/nccl/nccl_api.hpp"

namespace fsdp {

class NcclGroup;

// Note [Memory that NCCL knows]
// A window is made by all ranks together, and NCCL takes it for granted that they use the same one, at the same offset,
// in the same collective: it computes where the others' memory lies from its own. So all that decides which window is
// made, used or given back must come out the same on all ranks. Whether a tensor still refers to memory does not: a
// rank's user may keep one. Nor does what a gradient is: one rank may have none. Here only the memory follows the
// tensors; registrations follow the slots, which whoever plans collectives makes and lets go of at the same places of
// the ranks' common order of launches. A window belongs to one of NCCL's communicators, and so to gathers or to
// reductions (see Note [Two NCCL communicators]). (NCCL binds windows to the switches' multicast memory at offsets that
// each rank takes from an allocator of its own: registering and giving back in another order on one rank would move them
// apart.)
//
// A captured graph brings its own order: inside of a capture no events are kept from one tensor to the next, as those
// recorded in another capture or outside must not be waited for. The launch itself runs behind the current stream. Nobody
// sees when a graph runs again, and NCCL alone knows when it has gone: it ends a communicator only then. Until that, memory
// that a graph has captured stays, and so does its registration while the group lives.

/// What memory needs to know of its group, which it keeps.
struct NcclMemorySource {
  const NcclApi& api;
  std::shared_ptr<CommStreams> streams;
  SlotUse use = SlotUse::kGathers;
  /// Waits until nothing that NCCL runs for the group and that use can touch memory any more; false: that has not come.
  std::function<bool(std::chrono::milliseconds most)> await_quiet;
};

/// Memory of ncclMemAlloc to which one tensor at a time refers. It is freed when nobody refers to the block or to the
/// tensor and the device is done with it: where that takes time, by a host that waits. What a graph may use when it runs
/// again is not freed. Thread-safe.
class NcclBlock : public std::enable_shared_from_this<NcclBlock> {
 public:
  /// Rounds `bytes` up to what NCCL gives out.
  static int64_t whole(int64_t bytes);
  /// Allocates a block. Null where NCCL gives none.
  static std::shared_ptr<NcclBlock> allocate(NcclMemorySource source, int64_t bytes);
  NcclBlock(NcclMemorySource source, void* memory, int64_t bytes)
      : source_(std::move(source)), memory_(memory), bytes_(bytes) {}
  ~NcclBlock();
  NcclBlock(const NcclBlock&) = delete;
  NcclBlock& operator=(const NcclBlock&) = delete;

  void* memory() const { return memory_; }
  bool contains(const void* other) const {
    const auto* begin = static_cast<const char*>(memory_);
    return other >= begin && other < begin + bytes_;
  }
  SlotUse use() const { return source_.use; }
  /// Returns the first `bytes`, as SymmMemBuffer::take says.
  at::Tensor take(int64_t bytes);
  bool is_taken() const { return is_taken_; }

  /// Sets its registration; null: there is none.
  void set_window(ncclWindow_t window) { window_ = window; }
  bool has_window() const { return window_ != nullptr; }
  /// Takes its registration, for the caller to give back: nobody else gets it.
  ncclWindow_t take_window() { return window_.exchange(nullptr); }

  /// Notes that a graph has captured a collective that uses the block, or somebody who takes it.
  void note_captured() { may_be_replayed_ = true; }
  /// True if such a graph may be there still.
  bool may_be_replayed() const { return may_be_replayed_; }
  void forget_captures() { may_be_replayed_ = false; }

 private:
  void let_go() noexcept;

  const NcclMemorySource source_;
  void* const memory_;
  const int64_t bytes_;
  std::atomic<bool> is_taken_{false};
  std::atomic<bool> may_be_replayed_{false};
  std::atomic<ncclWindow_t> window_{nullptr};
  std::mutex mutex_;
  std::shared_ptr<StreamEvent> released_;  // behind what used the last tensor; guarded by the mutex
};

/// A block that is registered for a group's collectives of one use, until the slot goes or the group does.
class NcclSlot final : public SymmMemBuffer {
 public:
  NcclSlot(std::shared_ptr<NcclGroup> group, std::shared_ptr<NcclBlock> block, int64_t bytes)
      : group_(std::move(group)), block_(std::move(block)), bytes_(bytes) {}
  ~NcclSlot() override;

  int64_t bytes() const override { return bytes_; }
  at::Tensor take(int64_t bytes) override;
  bool is_taken() const override { return block_->is_taken(); }

 private:
  std::shared_ptr<NcclGroup> group_;
  std::shared_ptr<NcclBlock> block_;
  int64_t bytes_;
};

}  // namespace fsdp
