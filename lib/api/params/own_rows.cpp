#include "api/params/own_rows.hpp"

#include "dispatch/residency.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

at::Tensor own_rows(const FoundParam& found, const at::Tensor& whole) {
  BelowResidency below;
  return part_of(found.param().layout(), whole.detach(), found.group->identity().mesh_info.shard_rank());
}

at::Tensor own_of_whole(const FoundParam& found, const at::Tensor& whole) {
  const auto& part = found.param().spec.reach.part;
  return own_rows(found, part ? part->part_of(whole.detach()) : whole);
}

}  // namespace fsdp
