#include "root/edit/group_conversion.hpp"

#include "base/log.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "root/edit/edit_group.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// What users have put in the place of values, or toggled, is the parameters' before they are converted.
void take_over_changes(ParamGroup& group) {
  const BelowResidency below;
  group.changes().sync_grad_dtypes();
  if (group.parts().config.device.is_meta()) return;
  for (size_t i = 0; i < group.params().size(); ++i) {
    try {
      group.params()[i].reset_sharded_param(group.parts().shard.piece(i));
    } catch (const StateError& error) {
      // LibTorch's own to(), tried before this one and told of; the old values are back.
      log().info("{}", error.what());
    }
  }
}

}  // namespace

void check_convertible(const ParamGroup& group, const GroupConversion& to) {
  const auto& parts = group.parts();
  require_state(!root_of(group).step().is_pinned(),
                "'{}' shows full parameters (fsdp::FullParameters); end that scope before changing its dtype "
                "or device",
                group.name());
  // Parameters without values take part in no step, though a use of them may have begun one.
  require_state(root_of(group).is_quiescent() || parts.config.device.is_meta(),
                "'{}' is in the middle of a step; change its dtype or device before forward or after "
                "backward (after an exception, call reset_iter_state() on the root first)",
                group.name());
  for (const auto& param : parts.params) param.unsharded.check(param.name());
  if (to.dtype) group.unsharder().inputs().check(parts, dtypes_in(parts, to.dtype, parts.computes_in_own_dtype).stored);
}

void convert(ParamGroup& group, const GroupConversion& to) {
  const std::lock_guard lock(root_of(group).mutex());
  check_convertible(group, to);
  take_over_changes(group);
  edit(group, {.device = to.device, .dtype = to.dtype});
}

void compute_in_own_dtype(ParamGroup& group, bool value) {
  const std::lock_guard lock(root_of(group).mutex());
  auto& parts = group.parts();
  if (value == parts.computes_in_own_dtype) return;
  if (dtypes_in(parts, {}, value).gathered != dtypes_of(parts).gathered) {
    const BelowResidency below;
    group.changes().refresh();
    // Sums that wait for a reduction stay in the dtype that they are added up in.
    group.gradients().store.accumulate(group.gradients().dtypes);
  }
  edit(group, {.computes_in_own_dtype = value});
}

}  // namespace fsdp
