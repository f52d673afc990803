#include "group/symmetric_memory.hpp"

#include "group/comm_context.hpp"
#include "group/param_group.hpp"

namespace fsdp {

namespace {

bool may_use_slots(const ParamGroup& group) {
  return group.options().memory.has_symmetric_memory && group.identity().mesh_info.shard_size() > 1;
}

}  // namespace

void symmetric_memory_changed(ParamGroup& group) {
  group.unsharder().memory().drop_kept();
  if (group.options().memory.has_symmetric_memory) return;
  auto& shared = *group.parts().comm_ctx;
  shared.gather_slots.remove(group);
  shared.reduction_slots.remove(group);
}

bool gathers_in_slots(const ParamGroup& group) {
  return may_use_slots(group) && group.unsharder().inputs().encoded() == nullptr;
}

bool reduces_in_slots(const ParamGroup& group) {
  return may_use_slots(group) && !group.options().reduce.custom_reduce_scatter;
}

}  // namespace fsdp
