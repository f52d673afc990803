#include <ATen/ATen.h>

#include "base/log.hpp"
#include "group/gather_values.hpp"
#include "group/param_group.hpp"
#include "group/root_context.hpp"
#include "param/residency.hpp"

// Parameters that are tied across groups go to the group of the module around all their owners (S6). The
// tensor in the parameter table stays the same one; the group that gives it up keeps an empty place.
namespace fsdp {

at::ScalarType GroupParam::dtype() const {
  return held ? held->group->params()[held->index].dtype() : handle.scalar_type();
}

/// Every rank holds there what it will hold here, shaped alike.
bool ParamGroup::is_cut_alike(const Taken& taken) const {
  const auto& here = params_[taken.index].layout();
  const auto& there = taken.from.group->params_[taken.from.index].layout();
  return !here.is_flat() && here == there && identity.mesh_info.mesh == taken.from.group->identity.mesh_info.mesh &&
         config_.device == taken.from.group->config_.device;
}

/// The other group's memory, where that is the parameter's own (one rank); else undefined.
at::Tensor ParamGroup::piece_of(const Taken& taken) const {
  const auto& from = *taken.from.group;
  const bool is_own = !config_.home && !from.shard_.defined() && !from.config_.device.is_meta();
  return is_own && is_cut_alike(taken) ? from.pieces_[taken.from.index] : at::Tensor();
}

void ParamGroup::copy_taken_pieces() {
  if (config_.device.is_meta()) return;
  for (const auto& taken : taken_) {
    if (!is_cut_alike(taken)) continue;
    auto& from = *taken.from.group;
    auto& param = from.params_[taken.from.index];
    param.bring_home(from.pieces_[taken.from.index]);
    const int64_t bytes = param.local_bytes();
    if (bytes > 0 && !pieces_[taken.index].is_same(from.pieces_[taken.from.index]))
      pieces_[taken.index].narrow(0, 0, bytes).copy_(from.pieces_[taken.from.index].narrow(0, 0, bytes));
  }
}

void ParamGroup::gather_taken() {
  BelowResidency below;
  for (auto& taken : taken_) {
    if (config_.device.is_meta() || is_cut_alike(taken)) continue;
    const FoundParam there{taken.from.group, taken.from.index, /*is_handle=*/false};
    there.param().bring_home(there.group->pieces_[there.index]);
    const auto registered = there.param().registered();
    const auto& param = params_[taken.index];
    param.copy_part_to(pieces_[taken.index], gather_values(there, registered.detach()));
    if (registered.grad().defined())
      taken.gradient = param.layout()
                           .part_of(gather_values(there, registered.grad()), identity.mesh_info.shard_rank())
                           .to(home_device(), /*non_blocking=*/false, /*copy=*/true);
  }
}

void ParamGroup::take(const Taken& taken) {
  BelowResidency below;
  auto& param = params_[taken.index];
  const auto registered = param.registered();
  taken.from.group->give_up(taken.from.index);
  // In its new shape a gradient of the old one would be wrong.
  if (taken.gradient.defined()) registered.mutable_grad().reset();
  param.make_registered(link_, taken.index, pieces_[taken.index]);
  if (taken.gradient.defined()) registered.mutable_grad() = taken.gradient;
}

void ParamGroup::give_up(size_t index) {
  const auto root = context;
  std::lock_guard lock(root->mutex());
  root->reshard(*this);
  drop_post_forward_shard();
  params_[index].vacate();
  extensions_[index].reset();
  tally.reset();
  count_trainable();
  root->budget().invalidate();
}

void ParamGroup::close_gaps() {
  // A flat run stays as it is cut: closing its gaps would take communication.
  if (!shard_.defined() || config_.layout == ParamLayout::kFlat) return;
  std::vector<size_t> vacant;
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].is_vacant() && layout_.stored_bytes(i) > 0) vacant.push_back(i);
  if (vacant.empty()) return;
  BelowResidency below;
  auto layout = layout_.without(vacant, *identity.mesh_info.shard_group);
  at::Tensor shard;
  try {
    shard = make_shard(layout.stored().rank_bytes(), config_.device);
  } catch (const std::exception& error) {
    log().warn("{}: {} parameters now belong to another group, but their memory stays here: {}", name(),
               vacant.size(), error.what());
    return;
  }
  move_pieces(std::move(layout), std::move(shard));
  show_pieces();
}

}  // namespace fsdp
