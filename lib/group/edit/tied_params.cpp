#include "group/edit/tied_params.hpp"

#include <ATen/ATen.h>

#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "group/unsharded_values.hpp"
#include "param/param_rows.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

at::ScalarType GroupParam::dtype() const {
  return tied ? tied->group->params()[tied->index].spec.dtype : unsharded_param.scalar_type();
}

namespace {

/// Every rank holds there what it will hold here, shaped alike.
bool is_cut_alike(const GroupParts& parts, const TiedParam& tied) {
  const auto& from = tied.from.group->parts();
  const auto& here = parts.params[tied.index].layout();
  const auto& there = from.params[tied.from.index].layout();
  return !here.is_flat() && here == there && parts.identity.mesh_info.mesh == from.identity.mesh_info.mesh &&
         parts.config.device == from.config.device;
}

}  // namespace

at::Tensor piece_of(const GroupParts& parts, const TiedParam& tied) {
  const auto& from = tied.from.group->parts();
  const bool is_own = !parts.config.host_memory && !from.shard.bytes().defined() && !from.config.device.is_meta();
  return is_own && is_cut_alike(parts, tied) ? from.shard.piece(tied.from.index) : at::Tensor();
}

void copy_tied_rows(GroupParts& parts, std::span<const TiedParam> all) {
  if (parts.config.device.is_meta()) return;
  for (const auto& tied : all) {
    if (!is_cut_alike(parts, tied)) continue;
    auto& from = tied.from.group->parts();
    auto& param = from.params[tied.from.index];
    const auto &here = parts.shard.piece(tied.index), &there = from.shard.piece(tied.from.index);
    param.reset_sharded_param(there);
    const int64_t bytes = param.spec.local_bytes();
    if (bytes > 0 && !here.is_same(there)) here.narrow(0, 0, bytes).copy_(there.narrow(0, 0, bytes));
  }
}

void gather_tied(GroupParts& parts, std::span<TiedParam> all) {
  BelowResidency below;
  for (auto& tied : all) {
    if (parts.config.device.is_meta() || is_cut_alike(parts, tied)) continue;
    auto& from = *tied.from.group;
    auto& there = from.params()[tied.from.index];
    there.reset_sharded_param(from.parts().shard.piece(tied.from.index));
    const auto local_tensor = there.local_tensor();
    const auto& param = parts.params[tied.index];
    copy_rows(param.spec, unsharded_values(from, tied.from.index, local_tensor.detach()), parts.shard.piece(tied.index));
    if (local_tensor.grad().defined())
      tied.gradient = part_of(param.layout(), unsharded_values(from, tied.from.index, local_tensor.grad()),
                              parts.identity.mesh_info.shard_rank())
                          .to(parts.shard.home_of(parts.config.device), /*non_blocking=*/false, /*copy=*/true);
  }
}

}  // namespace fsdp
