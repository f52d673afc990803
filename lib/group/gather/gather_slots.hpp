#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "group/symm_mem_pool.hpp"

namespace fsdp {

class ParamGroup;

/// What one group wants to be gathered into.
struct SlotNeed {
  int64_t bytes = 0;
  /// It is unsharded while many others come and go, so it shares with none.
  bool is_own = false;
  bool operator==(const SlotNeed&) const = default;
};

struct SlotPlan {
  std::vector<int64_t> bytes;  ///< by slot
  std::vector<size_t> slots;   ///< by group
};

/// needs: of one communicator's groups, in the order in which they are used. Those without a slot of their own share
/// `ring` slots in turn, each as large as its largest group.
SlotPlan plan_slots(std::span<const SlotNeed> needs, size_t ring);

// Note [Which slot]
// On all ranks a gather has to use the same slot, whatever tensors, streams or exceptions have done to one of them (see
// Note [Memory that NCCL knows]). So a group has one slot, by its place among the root's groups and by options, and
// never one that happens to be free. Where a group is still in the slot that the next one's gather goes to, it moves:
// its parameters are copied to memory of its own, which concerns this rank alone. In the usual order that never
// happens: with one group more in the ring than are gathered ahead, the one that had the slot before has been released.
// What encloses other groups, or stays after forward, would be in the way of every turn and has a slot of its own,
// which takes no more memory than it would take anyway while it is unsharded.

/// Says in which slots one root's groups are gathered, by place. Needs only grow: options that come and go, as when gradients
/// are accumulated, find their slots again. What asks for more than was planned (a wider dtype, a group that is to have a
/// slot of its own from now on), for groups that were not there, or for another number of them gathered ahead, is a new
/// plan, for which all buffers of the communicator are given back and made anew.
///
/// Not thread-safe: the root's lock guards it.
class GatherSlots {
 public:
  /// The group's buffer for the gather that is to start now, empty on this rank; a collective call where it has to be made.
  /// Null: there is none.
  /// prefetch_distance: groups that are gathered ahead.
  SymmMemBuffer* prepare(ParamGroup& group, int prefetch_distance);
  /// The group is gone, or is gathered elsewhere from now on and released: its communicator's slots go with the last one.
  void remove(const ParamGroup& group);
  /// Counts all buffers that are there.
  int64_t bytes() const;

 private:
  struct GatherRing {
    SymmMemPool pool;
    std::map<const ParamGroup*, std::pair<SlotNeed, size_t>> places = {};
    std::vector<ParamGroup*> last = {};  // by slot: who took it last
    size_t length = 0;
  };

  static void move_out(GatherRing& ring, size_t slot);
  static void plan(GatherRing& ring, const ParamGroup& group, size_t length);

  std::map<std::shared_ptr<Communicator>, GatherRing> rings_;
};

}  // namespace fsdp
