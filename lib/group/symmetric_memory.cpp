#include "group/symmetric_memory.hpp"

#include "group/comm_context.hpp"
#include "group/param_group.hpp"

namespace fsdp {

namespace {

bool may_use_slots(const GroupParts& parts) {
  return parts.has_symmetric_memory && parts.identity.mesh_info.shard_size() > 1;
}

}  // namespace

void set_symmetric_memory(ParamGroup& group, bool value) {
  auto& parts = group.parts();
  parts.has_symmetric_memory = value;
  group.unsharder().memory().drop_kept();
  if (value) return;
  parts.comm_ctx->gather_slots.remove(group);
  parts.comm_ctx->reduction_slots.remove(group);
}

bool gathers_in_slots(const ParamGroup& group) {
  return may_use_slots(group.parts()) && group.unsharder().form().encoded() == nullptr;
}

bool reduces_in_slots(const ParamGroup& group) {
  return may_use_slots(group.parts()) && !group.gradients().config.custom_reduce_scatter;
}

}  // namespace fsdp
