#include "group/gather/gather_slots.hpp"

#include <algorithm>

#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/symmetric_memory.hpp"

namespace fsdp {
namespace {

bool stays(const ParamGroup& group) {
  const auto& policy = group.options().residency;
  return !policy.after_forward.reshard || !policy.reshard_after_backward || group.options().memory.keeps_unsharded_storage;
}

/// Groups of one module enclose each other; they come and go together.
bool is_around(const ParamGroup& group, const ParamGroup& other) {
  return group.parts().tree.encloses(other.parts().tree) && group.parts().tree != other.parts().tree;
}

SlotNeed need_of(const ParamGroup& group) {
  const auto& groups = group.parts().comm_ctx->groups;
  const bool encloses_any = std::any_of(groups.begin(), groups.end(), [&](const ParamGroup* other) {
    return is_around(group, *other) && gathers_in_slots(*other) &&
           other->identity().mesh_info.shard_group == group.identity().mesh_info.shard_group;
  });
  return {.bytes = group.parts().slot_bytes(), .is_own = encloses_any || stays(group)};
}

/// With what it wanted before: options and modes that alternate, as when gradients are accumulated, would make all slots
/// anew each time.
SlotNeed grown(const SlotNeed& need, const SlotNeed& before) {
  return {.bytes = std::max(need.bytes, before.bytes), .is_own = need.is_own || before.is_own};
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

/// Who is in the slot still goes to memory of its own.
void GatherSlots::move_out(GatherRing& ring, size_t slot) {
  const auto* buffer = ring.pool.find(slot);
  auto* group = ring.last[slot];
  if (buffer != nullptr && group != nullptr && buffer->is_taken()) group->unsharder().leave_slot();
}

void GatherSlots::plan(GatherRing& ring, const ParamGroup& group, size_t length) {
  for (size_t slot = 0; slot < ring.pool.size(); ++slot) move_out(ring, slot);
  ring.pool.clear();
  const auto before = std::exchange(ring.places, {});
  ring.length = length;
  const auto& comm = group.identity().mesh_info.shard_group;
  std::vector<const ParamGroup*> members;
  std::vector<SlotNeed> needs;
  for (const auto* other : group.parts().comm_ctx->groups) {
    if (!gathers_in_slots(*other) || other->identity().mesh_info.shard_group != comm) continue;
    members.push_back(other);
    const auto known = before.find(other);
    needs.push_back(known == before.end() ? need_of(*other) : grown(need_of(*other), known->second.first));
  }
  const auto planned = plan_slots(needs, length);
  for (const int64_t bytes : planned.bytes) ring.pool.add(bytes);
  ring.last.assign(planned.bytes.size(), nullptr);
  for (size_t i = 0; i < members.size(); ++i) ring.places[members[i]] = {needs[i], planned.slots[i]};
}

SymmMemBuffer* GatherSlots::prepare(ParamGroup& group, int prefetch_distance) {
  const auto& comm = group.identity().mesh_info.shard_group;
  auto& ring = rings_.try_emplace(comm, GatherRing{.pool = {comm, SlotUse::kGathers}}).first->second;
  const auto length = static_cast<size_t>(1 + prefetch_distance);
  const auto place = ring.places.find(&group);
  const bool fits = place != ring.places.end() && grown(need_of(group), place->second.first) == place->second.first;
  if (!fits || ring.length != length) plan(ring, group, length);
  const size_t slot = ring.places.at(&group).second;
  const auto buffer = ring.pool.buffer(slot);
  if (!buffer) return nullptr;
  move_out(ring, slot);
  ring.last[slot] = &group;
  return buffer.get();
}

void GatherSlots::remove(const ParamGroup& group) {
  for (auto& [comm, ring] : rings_) {
    ring.places.erase(&group);
    for (auto*& last : ring.last)
      if (last == &group) last = nullptr;
  }
  std::erase_if(rings_, [](const auto& entry) { return entry.second.places.empty(); });
}

int64_t GatherSlots::bytes() const {
  int64_t bytes = 0;
  for (const auto& [comm, ring] : rings_) bytes += ring.pool.bytes();
  return bytes;
}

}  // namespace fsdp
