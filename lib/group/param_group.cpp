#include "group/param_group.hpp"

#include <ATen/ATen.h>

#include "base/plain_values.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "group/gather/prepared_extension.hpp"
#include "group/group_sanitizer.hpp"
#include "group/shard_rows.hpp"
#include "group/symmetric_memory.hpp"
#include "param/param_placements.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

namespace {

GroupLayout lay_out(std::span<const LayoutParam> params, const GroupConfig& config, const Communicator& group) {
  if (!config.cut_like) return GroupLayout(params, config.layout, group);
  std::vector<GroupLayout::Itemsizes> itemsizes;
  for (const auto& param : params) itemsizes.push_back({param.stored_itemsize, param.gathered_itemsize});
  return config.cut_like->with_itemsizes(itemsizes, group);
}

Extensions extensions_of(const std::vector<GroupParam>& params) {
  Extensions extensions;
  for (const auto& param : params) extensions.push_back(param.extension);
  return extensions;
}

/// An extension makes what is computed with, and keeps it: the unsharded parameter's values need no memory here.
bool is_made_elsewhere(const GroupParam& param, const GroupParts& parts) {
  return dynamic_cast<const PreparedExtension*>(param.extension.get()) != nullptr &&
         parts.identity.mesh_info.shard_size() > 1 && parts.config.layout != ParamLayout::kFlat;
}

/// In which form it is registered; one that is tied stays the tensor that it is.
void choose_form(FSDPParam& param, const GroupParam& given, const MeshInfo& info) {
  auto& spec = param.spec;
  if (given.is_dtensor) spec.dtensor = dtensor_spec(spec, info);
  if (!given.tied) return;
  const auto& held = given.tied->group->params()[given.tied->index];
  require(!held.spec.dtensor || spec.dtensor,
          "{}: is tied, tensor-parallel and already sharded by '{}', which the flat layout does not support; use "
          "ParamLayout::kPerParameter",
          given.name, given.tied->group->name());
  if (!held.spec.dtensor) spec.dtensor = nullptr;
  param.take_identity(held);
}

/// A gradient that the unsharded parameter already has moves to the sharded parameter: this rank's rows of it.
void take_over_gradient(FSDPParam& param, int shard_rank) {
  const auto unsharded_param = param.unsharded_param();
  if (!accumulated_grad(unsharded_param).defined()) return;
  BelowResidency below;
  auto gradient = plain_values(accumulated_grad(unsharded_param));
  const auto local_tensor = param.local_tensor();
  if (!param.layout().is_whole()) gradient = part_of(param.layout(), gradient, shard_rank).clone();
  local_tensor.mutable_grad() = gradient.to(local_tensor.device());
  accumulated_grad(unsharded_param).reset();
}

}  // namespace

ParamGroup::ParamGroup(OwnerLink link, GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params)
    : parts_{.link = std::move(link), .identity = std::move(identity), .config = std::move(config)},
      unsharder_(parts_, extensions_of(params)),
      gradients_(parts_, options_.reduce, params.size()),
      changes_(parts_, gradients_, notes_) {
  BelowResidency below;
  const auto& info = parts_.identity.mesh_info;
  std::vector<LayoutParam> laid;
  for (const auto& param : params) {
    laid.push_back(layout_param(param));
    if (is_made_elsewhere(param, parts_)) laid.back().gathered_itemsize = 0;
  }
  parts_.layout = lay_out(laid, parts_.config, *info.shard_group);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i];
    parts_.identity.params.push_back(param.name);
    parts_.params.emplace_back(
        ParamSpec{.name = param.name,
                  .layout = parts_.layout.shard(i),
                  .rank = info.shard_rank(),
                  .param_dtype = param.param_dtype,
                  .asked_param_dtype = param.has_param_dtype ? std::optional(param.param_dtype) : std::nullopt,
                  .output_dtype = param.output_dtype,
                  .reach = param.reach},
        param.unsharded_param);
    choose_form(parts_.params.back(), param, info);
    if (param.tied) tied_.push_back({i, *param.tied});
    // In Python, as with FSDP2, a state dict of before may go on with the values of before.
    if (param.is_dtensor) closes_left_ = LeftStorages::Closes::kWhereWhole;
    parts_.is_cast |= parts_.params.back().spec.is_cast();
  }
  parts_.shard = ShardBuffer(parts_.config.host_memory);
  make_rows(parts_, tied_);
  unsharder_.set_encoded(unsharder_.inputs().plan(parts_, parts_.layout, stored_dtypes(parts_)));
  changes_.count_trainable();
  gradients_.dtypes.plan();
  if (parts_.config.sanitizer)
    parts_.sanitizer =
        std::make_unique<GroupSanitizer>(*parts_.config.sanitizer, info.world_rank(), info.mesh.device());
}

void ParamGroup::place(TreeInterval tree, std::string name, std::vector<std::string> params) {
  parts_.tree = tree;
  for (size_t i = 0; i < params.size(); ++i) parts_.params[i].rename(params[i]);
  parts_.identity.name = std::move(name);
  parts_.identity.params = std::move(params);
}

void ParamGroup::attach() {
  const auto self = parts_.owner().shared_from_this();
  for (size_t i = 0; i < parts_.params.size(); ++i) {
    auto& param = parts_.params[i];
    const auto& piece = parts_.shard.piece(i);
    const auto unsharded_param = param.unsharded_param();
    // One rank's memory may go on as its piece: then nothing was copied out.
    const auto* own = unsharded_param.has_storage() ? unsharded_param.storage().unsafeGetStorageImpl() : nullptr;
    const bool is_kept = piece.defined() && piece.storage().unsafeGetStorageImpl() == own;
    if (is_kept && closes_left_ != LeftStorages::Closes::kNever) note_kept_memory(unsharded_param, piece, param.name());
    if (piece.defined() && !is_kept) notes_.left().note(unsharded_param, i, closes_left_);
    take_over_gradient(param, parts_.identity.mesh_info.shard_rank());
    param.attach(self, parts_.config.device);
  }
  notes_.left().settle([&](size_t i) { return parts_.params[i].name(); });
  gradients_.dtypes.plan();
  unsharder_.rest();
}

void ParamGroup::set_options(GroupOptions options) {
  auto& form = unsharder_.inputs();
  const auto& custom = options.memory.custom_all_gather;
  const bool travels_otherwise = custom != options_.memory.custom_all_gather;
  auto encoded = travels_otherwise ? AllGatherInputs::plan_with({form.terms().extensions, custom.get()}, parts_, parts_.layout,
                                                            stored_dtypes(parts_))
                                   : nullptr;
  // Nothing of what follows fails.
  const auto before = std::exchange(options_, std::move(options));
  const auto& memory = options_.memory;
  if (travels_otherwise) {
    form.set_custom(memory.custom_all_gather);
    unsharder_.set_encoded(std::move(encoded));
  }
  if (memory.has_symmetric_memory != before.memory.has_symmetric_memory) symmetric_memory_changed(*this);
  unsharder_.memory().set_keeps(memory.keeps_unsharded_storage);
  if (options_.residency.after_forward != before.residency.after_forward) unsharder_.drop_post_forward_piece();
  if (options_.reduce.in_own_dtype != before.reduce.in_own_dtype) gradients_.dtypes.plan();
}

}  // namespace fsdp
