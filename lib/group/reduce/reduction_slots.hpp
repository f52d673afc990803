#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/work.hpp"
#include "group/symm_mem_pool.hpp"

namespace fsdp {

class ParamGroup;

// Note [Slots of reductions]
// What is packed for a reduce-scatter is written once anyway, so it is written to a slot. A gradient that travels as
// it lies stays where autograd made it: to bring it to a slot would take a pass over all of it and a buffer as large,
// which the faster collective had to win back. What comes out is in LibTorch's memory, as it becomes `.grad`.
//
// The ranks have to agree (see Note [Memory that NCCL knows]). So the layout decides what is in a slot and where (see
// `packed_bytes`), not what one rank's gradients are. And the slot is the first that no reduction holds, where one
// holds its slot from packing until a stream has been made to wait for its collective: in the order of the schedule,
// not when the device is done. What packs into it next runs behind the stream that let go of it.

/// Says in which slots one root's reductions are packed, by hold. Of each communicator there are as many as reductions may be
/// alive together (max_input_buffers), each as large as the largest group's packed gradients. They only grow.
///
/// Not thread-safe: the root's lock guards it.
class ReductionSlots {
 public:
  /// One reduction's hold on its slot: as long as this lives, nobody else gets it.
  class Hold {
   public:
    explicit Hold(std::shared_ptr<SymmMemBuffer> buffer) : buffer_(std::move(buffer)) {}
    /// Lets the current stream wait for what is under way still, as after an exception.
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    /// The whole slot, as SymmMemBuffer::take.
    at::Tensor take(int64_t bytes) { return buffer_->take(bytes); }
    /// A collective that reads the slot has begun.
    void note_reader(std::shared_ptr<Work> work) { under_way_.push_back(std::move(work)); }
    /// A stream has been made to wait for all of these.
    void note_waited() { under_way_.clear(); }

   private:
    std::shared_ptr<SymmMemBuffer> buffer_;
    std::vector<std::shared_ptr<Work>> under_way_;
  };

  /// A slot for what `group` is to pack now, `bytes`; a collective call where its buffer has to be made. Null: there is
  /// none.
  std::shared_ptr<Hold> hold(const ParamGroup& group, int64_t bytes);
  /// The group is gone, or does not use slots any more: its communicator's slots go with the last one.
  void remove(const ParamGroup& group);
  /// Counts all buffers that are there.
  int64_t bytes() const;

 private:
  struct ReductionRing {
    SymmMemPool pool;
    std::vector<std::weak_ptr<Hold>> holds = {};  // by slot
    int64_t slot_bytes = 0;
  };

  static void grow(ReductionRing& ring, const Communicator* comm, const ParamGroup& group, int64_t bytes);
  void drop_unused(std::span<ParamGroup* const> groups, const ParamGroup* but);

  std::map<std::shared_ptr<Communicator>, ReductionRing> rings_;
};

}  // namespace fsdp
