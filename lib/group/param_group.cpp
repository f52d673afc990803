#include "group/param_group.hpp"

#include <ATen/ATen.h>

#include "base/log.hpp"
#include "dispatch/residency.hpp"
#include "group/comm_context.hpp"
#include "group/group_sanitizer.hpp"
#include "group/reduce/dense_gradient.hpp"
#include "param/param_rows.hpp"
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

/// A gradient that the unsharded parameter already has moves to the sharded parameter: this rank's rows of it.
void take_over_gradient(FSDPParam& param, int shard_rank) {
  const auto unsharded_param = param.unsharded_param();
  if (!unsharded_param.grad().defined()) return;
  BelowResidency below;
  auto gradient = dense_gradient(unsharded_param.grad());
  const auto sharded_param = param.sharded_param();
  if (!param.layout().is_whole()) gradient = part_of(param.layout(), gradient, shard_rank).clone();
  sharded_param.mutable_grad() = gradient.to(sharded_param.device());
  unsharded_param.mutable_grad().reset();
}

}  // namespace

ParamGroup::ParamGroup(OwnerLink link, GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params)
    : link_(std::move(link)),
      parts_{.identity = std::move(identity), .config = std::move(config)},
      unsharder_(parts_, extensions_of(params)),
      gradients_(parts_, params.size()) {
  BelowResidency below;
  const auto& info = parts_.identity.mesh_info;
  std::vector<LayoutParam> laid;
  for (const auto& param : params) laid.push_back(layout_param(param));
  parts_.layout = lay_out(laid, parts_.config, *info.shard_group);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i];
    parts_.identity.params.push_back(param.name);
    parts_.params.emplace_back(ParamSpec{.name = param.name,
                                         .layout = layout().shard(i),
                                         .rank = info.shard_rank(),
                                         .param_dtype = param.param_dtype,
                                         .asked_param_dtype = param.has_param_dtype ? std::optional(param.param_dtype) : std::nullopt,
                                         .output_dtype = param.output_dtype,
                                         .spread = param.spread},
                               param.unsharded_param);
    if (param.tied) {
      parts_.params.back().take_identity(param.tied->group->params()[param.tied->index]);
      tied_.push_back({i, *param.tied});
    }
    parts_.is_cast |= parts_.params.back().spec.is_cast();
  }
  parts_.shard = ShardBuffer(parts_.config.host_memory);
  make_rows();
  unsharder_.set_encoded(unsharder_.form().plan(parts_, layout(), stored_dtypes(parts_)));
  count_trainable();
  gradient_dtypes().plan();
  if (parts_.config.sanitizer)
    parts_.sanitizer =
        std::make_unique<GroupSanitizer>(*parts_.config.sanitizer, info.world_rank(), info.mesh.device());
}

/// The shard with this rank's rows, and the sharded parameters on top of it.
void ParamGroup::make_rows() {
  const auto device = config().device;
  std::vector<at::Tensor> pieces;
  for (const auto& param : params())
    pieces.push_back(config().host_memory ? at::Tensor() : own_memory(param.spec, param.unsharded_param(), device));
  for (const auto& tied : tied_) pieces[tied.index] = piece_of(parts_, tied);
  const bool all_alias =
      std::all_of(pieces.begin(), pieces.end(), [](const at::Tensor& piece) { return piece.defined(); });
  const auto bytes = all_alias ? at::Tensor() : parts_.shard.make(layout().stored().rank_bytes(), device);
  for (size_t i = 0; i < pieces.size(); ++i) {
    auto& param = params()[i];
    const bool is_new = !pieces[i].defined();
    if (is_new) pieces[i] = bytes.narrow(0, layout().stored_offset(i), layout().stored_bytes(i));
    if (param.sharded.is_taken()) continue;  // its sharded parameter is another group's still
    if (is_new && !param.unsharded_param().is_meta()) copy_rows(param.spec, param.unsharded_param().detach(), pieces[i]);
    param.make_sharded_param(link_, i, pieces[i]);
  }
  parts_.shard.set(bytes, std::move(pieces));
  copy_tied_rows(parts_, tied_);
}

void ParamGroup::set_layout(GroupLayout layout) {
  auto encoded = unsharder_.form().plan(parts_, layout, stored_dtypes(parts_));
  parts_.layout = std::move(layout);
  unsharder_.set_encoded(std::move(encoded));
}

void ParamGroup::move_rows(GroupLayout layout, at::Tensor shard) {
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < params().size(); ++i) {
    const auto& before = parts_.shard.piece(i);
    pieces.push_back(shard.narrow(0, layout.stored_offset(i), layout.stored_bytes(i)));
    // What a parameter left behind in a flat run is padding from now on: zero.
    if (!shard.is_meta() && !params()[i].has_moved_away) pieces[i].narrow(0, 0, before.numel()).copy_(before);
  }
  set_layout(std::move(layout));
  parts_.shard.set(std::move(shard), std::move(pieces));
  for (size_t i = 0; i < params().size(); ++i)
    if (params()[i].sharded_param().defined()) params()[i].make_sharded_param(link_, i, parts_.shard.piece(i));
}

void ParamGroup::note_first_values() {
  if (identity().mesh_info.data_parallel_size() == 1 || config().device.is_meta()) return;
  BelowResidency below;
  auto values = std::make_unique<FirstValues>();
  for (const auto& param : params())
    values->add(param.sharded.is_taken() ? at::Tensor() : param.unsharded_param(), param.sharded.version());
  notes_.keep_first_values(std::move(values));
}

void ParamGroup::attach() {
  const auto self = owner().shared_from_this();
  for (size_t i = 0; i < params().size(); ++i) {
    auto& param = params()[i];
    const auto& piece = parts_.shard.piece(i);
    const auto unsharded_param = param.unsharded_param();
    // One rank's memory may go on as its piece: then nothing was copied out.
    const auto* own = unsharded_param.has_storage() ? unsharded_param.storage().unsafeGetStorageImpl() : nullptr;
    if (piece.defined() && piece.storage().unsafeGetStorageImpl() != own) notes_.left().note(unsharded_param, i);
    take_over_gradient(param, identity().mesh_info.shard_rank());
    param.attach(self, config().device);
  }
  gradient_dtypes().plan();
  unsharder_.rest();
}

void ParamGroup::rename(std::string name, const std::vector<std::string>& param_names) {
  parts_.identity.name = std::move(name);
  parts_.identity.params = param_names;
  for (size_t i = 0; i < params().size(); ++i) params()[i].rename(param_names[i]);
}

void ParamGroup::set_symmetric_memory(bool value) {
  has_symmetric_memory_ = value;
  unsharder_.memory().drop_kept();
  if (value) return;
  comm_ctx()->gather_slots.remove(*this);
  comm_ctx()->reduction_slots.remove(*this);
}

bool ParamGroup::uses_slots() const {
  return has_symmetric_memory_ && unsharder_.form().encoded() == nullptr && identity().mesh_info.shard_size() > 1;
}

bool ParamGroup::reduces_in_slots() const {
  return has_symmetric_memory_ && !reduction().custom_reduce_scatter && identity().mesh_info.shard_size() > 1;
}

void ParamGroup::prepare_unshard() {
  unsharder_.check_can_unshard();
  if (is_stale()) {
    BelowResidency below;
    refresh();
    unsharder_.drop_post_forward_piece();  // made of values from before the write
  }
  is_outdated_ = false;
}

void ParamGroup::sync_versions() {
  if (!parts_.has_writes()) return;
  notes_.optimizer().note_write();
  is_outdated_ = !parts_.is_never_released();
  for (auto& param : params()) param.sync_version();
}

bool ParamGroup::sync_requires_grad() {
  if (classes_) classes_->check_requires_grad(*this);
  bool changed = false;
  for (auto& param : params()) changed |= param.sync_requires_grad();
  if (!changed) return false;
  count_trainable();
  gradient_dtypes().plan();
  return true;
}

void ParamGroup::sync_grad_dtypes() {
  bool has_changed = false;
  for (auto& param : params()) has_changed |= param.sync_grad_dtype();
  if (classes_) classes_->check_grad_dtypes(*this);  // in every step, until it is set back
  if (has_changed) gradient_dtypes().plan();
}

void ParamGroup::count_trainable() {
  gradients_.trainable_count = static_cast<size_t>(std::count_if(
      params().begin(), params().end(), [](const auto& param) { return param.requires_grad(); }));
  notes_.trainable_changed();
}

void ParamGroup::validate() {
  for (size_t i = 0; i < params().size(); ++i) {
    params()[i].unsharded.check(params()[i].name());
    if (!config().device.is_meta()) params()[i].reset_sharded_param(parts_.shard.piece(i));
  }
  if (owner().is_between_steps()) sync_grad_dtypes();
  if (parts_.sanitizer && !config().device.is_meta()) [[unlikely]]
    parts_.sanitizer->check_shards(params(), parts_.shard.pieces());
}

void ParamGroup::bump_versions(size_t index) {
  if (index < params().size())
    params()[index].sharded.bump_version();
  else
    for (const size_t member : classes_->members(index - params().size())) params()[member].sharded.bump_version();
}

}  // namespace fsdp
