#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/comm_memory.hpp"

namespace fsdp {

/// The registered memory that a root's groups share for one use of one communicator's collectives: slots, by number, each of
/// which gets its buffer when it is first needed. Keeps the communicator alive.
///
/// Which slot a collective uses is a rule of those who have the pool: GatherSlots goes by a group's place in a ring,
/// ReductionSlots by who holds one. All ranks have to come to the same slot, and to the same calls of `buffer`, `add` and
/// `clear`, in the same places of the common order of launches (Note [Memory that NCCL knows]).
class SymmMemPool {
 public:
  SymmMemPool(std::shared_ptr<Communicator> comm, SlotUse use) : comm_(std::move(comm)), use_(use) {}

  size_t size() const { return slots_.size(); }
  /// Counts all buffers that are there.
  int64_t bytes() const;

  /// One slot more, without a buffer yet.
  void add(int64_t bytes) { slots_.push_back({.bytes = bytes}); }
  /// No slots any more. Buffers are given back, but for those that somebody shares: these are when he lets go.
  void clear() { slots_.clear(); }

  /// A collective call the first time. Null: there is no such memory, which is so on all ranks.
  std::shared_ptr<SymmMemBuffer> buffer(size_t slot);
  /// Null: it was not needed yet, or there is none.
  const SymmMemBuffer* find(size_t slot) const { return slots_[slot].buffer.get(); }

 private:
  struct Slot {
    int64_t bytes = 0;
    bool was_made = false;
    std::shared_ptr<SymmMemBuffer> buffer = nullptr;
  };

  std::shared_ptr<Communicator> comm_;  // outlives the buffers
  SlotUse use_;
  std::vector<Slot> slots_;
};

}  // namespace fsdp
