#include "group/reduce/reduction_slots.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/collect_gradients.hpp"
#include "group/reduce/reduce_call.hpp"

namespace fsdp {
namespace {

bool is_over(const ParamGroup& group, const Communicator* comm) {
  return group.reduces_in_slots() && reduction_comm(group).get() == comm;
}

/// That the group's reductions want when all trainable parameters have gradients.
int64_t expected_slot_bytes(ParamGroup& group) {
  auto parts = expected_parts(group);
  return measure_slot(group, parts);
}

}  // namespace

ReductionSlots::Hold::~Hold() {
  for (const auto& work : under_way) try {
      work->wait();
    } catch (const std::exception& error) {
      log().info("a reduction was given up, and failed: {}", error.what());
    }
  slot_->is_held = false;
}

std::unique_ptr<ReductionSlots::Hold> ReductionSlots::hold(const ParamGroup& group, int64_t bytes) {
  if (bytes == 0) return nullptr;
  const auto& comm = reduction_comm(group);
  auto& ring = rings_[comm.get()];
  ring.comm = comm;
  const auto most = static_cast<size_t>(group.reduction().max_input_buffers);
  if (bytes > ring.slot_bytes || most > ring.slots.size()) grow(ring, group, bytes);
  const auto free = std::find_if(ring.slots.begin(), ring.slots.end(), [](const auto& slot) { return !slot->is_held; });
  if (free == ring.slots.end()) return nullptr;
  auto& slot = **free;
  if (!std::exchange(slot.was_made, true)) slot.memory = make_slot(*comm, SlotUse::kReductions, ring.slot_bytes);
  return slot.memory ? std::make_unique<Hold>(*free) : nullptr;
}

void ReductionSlots::grow(Ring& ring, const ParamGroup& group, int64_t bytes) {
  const auto& groups = group.comm_ctx()->groups;
  size_t length = ring.slots.size();
  int64_t most_bytes = std::max(bytes, ring.slot_bytes);
  for (auto* other : groups) {
    if (!is_over(*other, ring.comm.get())) continue;
    length = std::max(length, static_cast<size_t>(other->reduction().max_input_buffers));
    most_bytes = std::max(most_bytes, expected_slot_bytes(*other));
  }
  // What is held goes when its reduction lets go of it.
  if (most_bytes > ring.slot_bytes) ring.slots.clear();
  ring.slot_bytes = most_bytes;
  while (ring.slots.size() < length) ring.slots.push_back(std::make_shared<Slot>());
  drop_unused(groups, nullptr);
}

void ReductionSlots::remove(const ParamGroup& group) { drop_unused(group.comm_ctx()->groups, &group); }

void ReductionSlots::drop_unused(std::span<ParamGroup* const> groups, const ParamGroup* but) {
  std::erase_if(rings_, [&](const auto& entry) {
    return std::none_of(groups.begin(), groups.end(),
                        [&](const ParamGroup* group) { return group != but && is_over(*group, entry.first); });
  });
}

int64_t ReductionSlots::bytes() const {
  int64_t bytes = 0;
  for (const auto& [comm, ring] : rings_)
    for (const auto& slot : ring.slots)
      if (slot->memory) bytes += ring.slot_bytes;
  return bytes;
}

}  // namespace fsdp
