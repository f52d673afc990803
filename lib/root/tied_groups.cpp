#include "root/tied_groups.hpp"

#include <ATen/ATen.h>

#include "base/log.hpp"
#include "dispatch/residency.hpp"
#include "group/shard_rows.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// The group that held it keeps an empty place.
void release_tied(ParamGroup& group, size_t index) {
  const auto root = GroupPort::of(group).root();
  std::lock_guard lock(root->mutex());
  root->control(group, GroupEvent::kUserReshards);
  group.params()[index].move_away();
  group.unsharder().form().set_extension(index, nullptr);
  group.gradients().store.reset();
  group.changes().count_trainable();
  root->runner().facts_changed(group);
}

}  // namespace

void take_tied(ParamGroup& group, const TiedParam& tied) {
  BelowResidency below;
  auto& parts = group.parts();
  auto& param = parts.params[tied.index];
  const auto sharded_param = param.sharded_param();
  tied.from.group->notes().left().hand_over(tied.from.index, group.notes().left(), tied.index);
  release_tied(*tied.from.group, tied.from.index);
  // In its new shape a gradient of the old one would be wrong.
  if (tied.gradient.defined()) sharded_param.mutable_grad().reset();
  param.make_sharded_param(parts.link, tied.index, parts.shard.piece(tied.index));
  if (tied.gradient.defined()) sharded_param.mutable_grad() = tied.gradient;
}

void compact(ParamGroup& group) {
  const auto& parts = group.parts();
  // A flat run stays as it is cut: closing its gaps would take communication.
  if (!parts.shard.bytes().defined() || parts.config.layout == ParamLayout::kFlat) return;
  std::vector<size_t> vacant;
  for (size_t i = 0; i < parts.params.size(); ++i)
    if (parts.params[i].has_moved_away && parts.layout.stored_bytes(i) > 0) vacant.push_back(i);
  if (vacant.empty()) return;
  BelowResidency below;
  auto layout = parts.layout.without(vacant, parts.shard_group());
  at::Tensor shard;
  try {
    shard = parts.shard.make(layout.stored().rank_bytes(), parts.config.device);
  } catch (const std::exception& error) {
    log().warn("{}: {} parameters now belong to another group, but their old memory was not freed: {}", group.name(),
               vacant.size(), error.what());
    return;
  }
  std::lock_guard lock(root_of(group).mutex());
  move_rows(group, std::move(layout), std::move(shard));
  group.unsharder().rest();
  root_of(group).runner().facts_changed(group);
}

}  // namespace fsdp
