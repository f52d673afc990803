#include "api/whole_values.hpp"

#include "param/residency.hpp"

namespace fsdp {

at::Tensor own_values(const FoundParam& found, const at::Tensor& whole) {
  BelowResidency below;
  return found.param().layout().part_of(whole.detach(), found.group->config().mesh_info.shard_rank());
}

}  // namespace fsdp
