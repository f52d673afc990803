#include "root/edit/tied_groups.hpp"

#include <ATen/ATen.h>

#include <mutex>

#include "dispatch/residency.hpp"
#include "root/group_port.hpp"

namespace fsdp {

void take_tied(ParamGroup& group, const TiedParam& tied) {
  BelowResidency below;
  auto& parts = group.parts();
  auto& param = parts.params[tied.index];
  const auto local_tensor = param.local_tensor();
  {
    const std::lock_guard lock(root_of(*tied.from.group).mutex());
    tied.from.group->notes().left().hand_over(tied.from.index, group.notes().left(), tied.index);
  }
  if (tied.kept.defined() && !tied.kept.is_alias_of(parts.shard.piece(tied.index)))
    group.notes().left().note_kept(tied.kept, tied.index);
  // In its new shape a gradient of the old one would be wrong.
  if (tied.gradient.defined()) local_tensor.mutable_grad().reset();
  param.make_sharded_param(parts.link, tied.index, parts.shard.piece(tied.index));
  if (tied.gradient.defined()) local_tensor.mutable_grad() = tied.gradient;
}

}  // namespace fsdp
