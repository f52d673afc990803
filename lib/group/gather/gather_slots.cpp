#include "group/gather/gather_slots.hpp"

#include <algorithm>

#include "group/comm_context.hpp"
#include "group/param_group.hpp"

namespace fsdp {
namespace {

bool stays(const ParamGroup& group) {
  const auto& policy = group.policy();
  return !policy.after_forward.reshard || !policy.reshard_after_backward || group.unsharder().memory().keeps();
}

/// Groups of one module enclose each other; they come and go together.
bool is_around(const ParamGroup& group, const ParamGroup& other) {
  return group.parts().tree.encloses(other.parts().tree) && group.parts().tree != other.parts().tree;
}

SlotNeed need_of(const ParamGroup& group) {
  const auto& groups = group.comm_ctx()->groups;
  const bool encloses_any = std::any_of(groups.begin(), groups.end(), [&](const ParamGroup* other) {
    return is_around(group, *other) && other->uses_slots() &&
           other->identity().mesh_info.shard_group == group.identity().mesh_info.shard_group;
  });
  return {.bytes = group.parts().slot_bytes(), .is_own = encloses_any || stays(group)};
}

/// With what it wanted before: options and modes that alternate, as when gradients are accumulated, would make all slots
/// anew each time.
SlotNeed grown(const SlotNeed& need, const SlotNeed& before) {
  return {.bytes = std::max(need.bytes, before.bytes), .is_own = need.is_own || before.is_own};
}

void move_out(ParamGroup* group, const CommSlot& slot) {
  if (group != nullptr && slot.is_taken()) group->unsharder().leave_slot();
}

}  // namespace

SlotPlan plan_slots(std::span<const SlotNeed> needs, size_t ring) {
  SlotPlan plan;
  std::vector<size_t> shared;
  size_t turn = 0;
  for (const SlotNeed& need : needs) {
    const bool is_new = need.is_own || shared.size() < ring;
    const size_t slot = is_new ? plan.bytes.size() : shared[turn % ring];
    if (is_new) plan.bytes.push_back(0);
    if (is_new && !need.is_own) shared.push_back(slot);
    if (!need.is_own) ++turn;
    plan.bytes[slot] = std::max(plan.bytes[slot], need.bytes);
    plan.slots.push_back(slot);
  }
  return plan;
}

void GatherSlots::plan(Ring& ring, const ParamGroup& group, size_t length) {
  for (auto& slot : ring.slots)
    if (slot.memory) move_out(slot.last, *slot.memory);
  ring.slots.clear();
  const auto before = std::exchange(ring.places, {});
  ring.length = length;
  std::vector<const ParamGroup*> members;
  std::vector<SlotNeed> needs;
  for (const auto* other : group.comm_ctx()->groups) {
    if (!other->uses_slots() || other->identity().mesh_info.shard_group != ring.comm) continue;
    members.push_back(other);
    const auto known = before.find(other);
    needs.push_back(known == before.end() ? need_of(*other) : grown(need_of(*other), known->second.first));
  }
  const auto planned = plan_slots(needs, length);
  for (const int64_t bytes : planned.bytes) ring.slots.push_back({.bytes = bytes});
  for (size_t i = 0; i < members.size(); ++i) ring.places[members[i]] = {needs[i], planned.slots[i]};
}

CommSlot* GatherSlots::prepare(ParamGroup& group, int prefetch_distance) {
  const auto& comm = group.identity().mesh_info.shard_group;
  auto& ring = rings_[comm.get()];
  ring.comm = comm;
  const auto length = static_cast<size_t>(1 + prefetch_distance);
  const auto place = ring.places.find(&group);
  const bool fits = place != ring.places.end() && grown(need_of(group), place->second.first) == place->second.first;
  if (!fits || ring.length != length) plan(ring, group, length);
  auto& slot = *find(group);
  if (!std::exchange(slot.was_made, true)) slot.memory = make_slot(*comm, SlotUse::kGathers, slot.bytes);
  if (!slot.memory) return nullptr;
  move_out(slot.last, *slot.memory);
  slot.last = &group;
  return slot.memory.get();
}

GatherSlots::Slot* GatherSlots::find(const ParamGroup& group) {
  auto& ring = rings_.at(group.identity().mesh_info.shard_group.get());
  return &ring.slots[ring.places.at(&group).second];
}

void GatherSlots::remove(const ParamGroup& group) {
  for (auto& [comm, ring] : rings_) {
    ring.places.erase(&group);
    for (auto& slot : ring.slots)
      if (slot.last == &group) slot.last = nullptr;
    if (ring.places.empty()) ring.slots.clear();
  }
}

int64_t GatherSlots::bytes() const {
  int64_t bytes = 0;
  for (const auto& [comm, ring] : rings_)
    for (const auto& slot : ring.slots)
      if (slot.memory) bytes += slot.bytes;
  return bytes;
}

}  // namespace fsdp
