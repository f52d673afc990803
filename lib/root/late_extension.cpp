#include "root/late_extension.hpp"

#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "group/shard_rows.hpp"
#include "root/group_conversion.hpp"
#include "root/group_port.hpp"

namespace fsdp {

void set_extension(ParamGroup& group, size_t index, std::shared_ptr<PreparedExtension> extension) {
  const auto root = GroupPort::of(group).root();
  std::lock_guard lock(root->mutex());
  auto& parts = group.parts();
  require_state(root->is_quiescent(), "{}: cannot be gathered in another form in the middle of a step",
                group.params()[index].name());
  BelowResidency below;
  root->control(group, GroupEvent::kUserReshards);
  auto itemsizes = dtypes_in(group, /*floating=*/std::nullopt, parts.eval_precision.is_own_dtype()).itemsizes;
  if (parts.identity.mesh_info.shard_size() > 1) itemsizes[index].gathered = 0;
  group.unsharder().form().set_extension(index, std::move(extension));
  set_layout(group, parts.layout.with_itemsizes(itemsizes, parts.shard_group()));
  group.unsharder().rest();
  root->runner().facts_changed(group);
  GroupPort::of(group).mark_not_ready();
}

}  // namespace fsdp
