#include "group/tied_params.hpp"

#include <ATen/ATen.h>

#include "base/log.hpp"
#include "group/gather/gather_values.hpp"
#include "group/param_group.hpp"
#include "group/root_context.hpp"
#include "param/residency.hpp"

namespace fsdp {

at::ScalarType GroupParam::dtype() const {
  return tied ? tied->group->params()[tied->index].dtype() : handle.scalar_type();
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

/// The group that held it keeps an empty place.
void release_tied(ParamGroup& group, size_t index) {
  const auto root = group.context;
  std::lock_guard lock(root->mutex());
  root->reshard(group);
  group.params()[index].vacate();
  group.unsharder().form().drop_extension(index);
  group.tally.reset();
  group.count_trainable();
  root->facts_changed(group);
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
    const int64_t bytes = param.local_bytes();
    if (bytes > 0 && !here.is_same(there)) here.narrow(0, 0, bytes).copy_(there.narrow(0, 0, bytes));
  }
}

void gather_tied(GroupParts& parts, std::span<TiedParam> all) {
  BelowResidency below;
  for (auto& tied : all) {
    if (parts.config.device.is_meta() || is_cut_alike(parts, tied)) continue;
    const FoundParam there{tied.from.group, tied.from.index, /*is_handle=*/false};
    there.param().reset_sharded_param(there.group->parts().shard.piece(there.index));
    const auto registered = there.param().registered();
    const auto& param = parts.params[tied.index];
    param.copy_part_to(parts.shard.piece(tied.index), gather_values(there, registered.detach()));
    if (registered.grad().defined())
      tied.gradient = param.layout()
                          .part_of(gather_values(there, registered.grad()), parts.identity.mesh_info.shard_rank())
                          .to(parts.shard.home_of(parts.config.device), /*non_blocking=*/false, /*copy=*/true);
  }
}

void take_tied(GroupParts& parts, const OwnerLink& link, const TiedParam& tied) {
  BelowResidency below;
  auto& param = parts.params[tied.index];
  const auto registered = param.registered();
  release_tied(*tied.from.group, tied.from.index);
  // In its new shape a gradient of the old one would be wrong.
  if (tied.gradient.defined()) registered.mutable_grad().reset();
  param.make_registered(link, tied.index, parts.shard.piece(tied.index));
  if (tied.gradient.defined()) registered.mutable_grad() = tied.gradient;
}

void compact(ParamGroup& group) {
  const auto& parts = group.parts();
  // A flat run stays as it is cut: closing its gaps would take communication.
  if (!parts.shard.bytes().defined() || parts.config.layout == ParamLayout::kFlat) return;
  std::vector<size_t> vacant;
  for (size_t i = 0; i < parts.params.size(); ++i)
    if (parts.params[i].is_vacant() && parts.layout.stored_bytes(i) > 0) vacant.push_back(i);
  if (vacant.empty()) return;
  BelowResidency below;
  auto layout = parts.layout.without(vacant, parts.shard_group());
  at::Tensor shard;
  try {
    shard = parts.shard.make(layout.stored().rank_bytes(), parts.config.device);
  } catch (const std::exception& error) {
    log().warn("{}: {} parameters now belong to another group, but their memory stays here: {}", group.name(),
               vacant.size(), error.what());
    return;
  }
  group.move_rows(std::move(layout), std::move(shard));
  group.unsharder().rest();
  if (group.context) group.context->facts_changed(group);
}

}  // namespace fsdp
