#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "comm/comm_memory.hpp"
#include "comm/work.hpp"

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

/// The slots that one root's reductions are packed in: for each communicator a ring of as many as may be alive together
/// (max_input_buffers), each as large as the largest group's packed gradients. They are made when they are first needed
/// and only grow.
///
/// Not thread-safe: the root's lock guards it.
class ReductionSlots {
  struct Slot {
    std::shared_ptr<CommSlot> memory = nullptr;  // null: not made, or there is none
    bool was_made = false;
    bool is_held = false;
  };

 public:
  /// One reduction's hold on its slot.
  class Hold {
   public:
    explicit Hold(std::shared_ptr<Slot> slot) : slot_(std::move(slot)) { slot_->is_held = true; }
    /// Lets the current stream wait for what is under way still, as after an exception.
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    /// The whole slot, as CommSlot::take.
    at::Tensor take(int64_t bytes) { return slot_->memory->take(bytes); }

    std::vector<std::shared_ptr<Work>> under_way;  ///< collectives that read the slot and were not waited for

   private:
    std::shared_ptr<Slot> slot_;
  };

  /// A slot for what `group` is to pack now, `bytes`; a collective call where it has to be made. Null: there is none.
  std::unique_ptr<Hold> hold(const ParamGroup& group, int64_t bytes);
  /// The group is gone, or does not use slots any more: its ring goes with the last one.
  void remove(const ParamGroup& group);
  /// Of all slots that are there.
  int64_t bytes() const;

 private:
  struct Ring {
    std::shared_ptr<Communicator> comm;  // outlives the slots
    int64_t slot_bytes = 0;
    std::vector<std::shared_ptr<Slot>> slots = {};
  };

  void grow(Ring& ring, const ParamGroup& group, int64_t bytes);
  void drop_unused(std::span<ParamGroup* const> groups, const ParamGroup* but);

  std::map<const Communicator*, Ring> rings_;
};

}  // namespace fsdp
