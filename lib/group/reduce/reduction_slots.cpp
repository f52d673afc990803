#include "group/reduce/reduction_slots.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/collect_gradients.hpp"
#include "group/reduce/reduce_call.hpp"
#include "group/symmetric_memory.hpp"

namespace fsdp {
namespace {

bool is_over(const ParamGroup& group, const Communicator* comm) {
  return reduces_in_slots(group) && reduction_comm(group).get() == comm;
}

/// That the group's reductions want when all trainable parameters have gradients.
int64_t expected_slot_bytes(ParamGroup& group) {
  auto buckets = expected_buckets(group);
  return measure_slot(group, buckets);
}

}  // namespace

ReductionSlots::Hold::~Hold() {
  for (const auto& work : under_way_) try {
      work->wait();
    } catch (const std::exception& error) {
      log().info("a gradient reduction of an abandoned step failed: {}", error.what());
    }
}

std::shared_ptr<ReductionSlots::Hold> ReductionSlots::hold(const ParamGroup& group, int64_t bytes) {
  if (bytes == 0) return nullptr;
  const auto& comm = reduction_comm(group);
  auto& ring = rings_.try_emplace(comm, ReductionRing{.pool = {comm, SlotUse::kReductions}}).first->second;
  const auto most = static_cast<size_t>(group.options().reduce.max_input_buffers);
  if (bytes > ring.slot_bytes || most > ring.pool.size()) {
    grow(ring, comm.get(), group, bytes);
    drop_unused(group.parts().comm_ctx->groups, nullptr);
  }
  const auto free = std::ranges::find_if(ring.holds, [](const auto& hold) { return hold.expired(); });
  if (free == ring.holds.end()) return nullptr;
  auto buffer = ring.pool.buffer(static_cast<size_t>(free - ring.holds.begin()));
  if (!buffer) return nullptr;
  auto hold = std::make_shared<Hold>(std::move(buffer));
  *free = hold;
  return hold;
}

void ReductionSlots::grow(ReductionRing& ring, const Communicator* comm, const ParamGroup& group, int64_t bytes) {
  size_t length = ring.pool.size();
  int64_t most_bytes = std::max(bytes, ring.slot_bytes);
  for (auto* other : group.parts().comm_ctx->groups) {
    if (!is_over(*other, comm)) continue;
    length = std::max(length, static_cast<size_t>(other->options().reduce.max_input_buffers));
    most_bytes = std::max(most_bytes, expected_slot_bytes(*other));
  }
  if (most_bytes > ring.slot_bytes) {
    // What is held goes when its reduction lets go of it.
    ring.pool.clear();
    ring.holds.clear();
  }
  ring.slot_bytes = most_bytes;
  while (ring.pool.size() < length) ring.pool.add(most_bytes);
  ring.holds.resize(length);
}

void ReductionSlots::remove(const ParamGroup& group) { drop_unused(group.parts().comm_ctx->groups, &group); }

void ReductionSlots::drop_unused(std::span<ParamGroup* const> groups, const ParamGroup* but) {
  std::erase_if(rings_, [&](const auto& entry) {
    return std::none_of(groups.begin(), groups.end(),
                        [&](const ParamGroup* group) { return group != but && is_over(*group, entry.first.get()); });
  });
}

int64_t ReductionSlots::bytes() const {
  int64_t bytes = 0;
  for (const auto& [comm, ring] : rings_) bytes += ring.pool.bytes();
  return bytes;
}

}  // namespace fsdp
