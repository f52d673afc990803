#include "group/edit/group_edit.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "dispatch/residency.hpp"
#include "group/param_group.hpp"

namespace fsdp {

namespace {

/// What was on meta had no values, and what goes there keeps none.
at::Tensor converted(const at::Tensor& tensor, c10::Device device, at::ScalarType dtype) {
  if (!tensor.defined() || tensor.is_meta() || device.is_meta()) return {};
  return tensor.detach().to(device, dtype);
}

/// One that was left in the reduce dtype stays in it, and so does one whose dtype was asked for.
at::Tensor converted_gradient(const FSDPParam& param, c10::Device home, at::ScalarType stored) {
  const auto local_tensor = param.local_tensor();
  const auto gradient = local_tensor.defined() ? local_tensor.grad() : at::Tensor();
  if (!gradient.defined()) return {};
  const bool follows = gradient.scalar_type() == param.spec.dtype && !param.grad_dtype().is_set;
  return converted(gradient, home, follows ? stored : gradient.scalar_type());
}

/// Whole, and not reduced yet.
at::Tensor converted_unreduced(const FSDPParam& param, c10::Device device, at::ScalarType gathered) {
  const auto unsharded_param = param.unsharded_param();
  const auto gradient = unsharded_param.defined() ? accumulated_grad(unsharded_param) : at::Tensor();
  if (!gradient.defined()) return {};
  return converted(gradient, device, grad_dtype_of(unsharded_param).takes_any() ? gradient.scalar_type() : gathered);
}

/// With parameters that have moved away behind them: these have places, which are empty.
std::vector<size_t> whole_order(const LocalShards& classes, const GroupParts& parts) {
  auto order = classes.order();
  for (size_t i = 0; i < parts.params.size(); ++i)
    if (parts.params[i].has_moved_away) order.push_back(i);
  return order;
}

}  // namespace

GroupEdit::GroupEdit(const GroupParts& parts, GroupChange change)
    : change_(std::move(change)), device_(change_.device.value_or(parts.config.device)),
      dtypes_(dtypes_in(parts, change_.dtype, change_.computes_in_own_dtype.value_or(parts.computes_in_own_dtype))) {
  const auto now = dtypes_of(parts);
  converts_ = device_ != parts.config.device || dtypes_.stored != now.stored;
  recasts_ = dtypes_.gathered != now.gathered;
}

bool GroupEdit::is_empty() const {
  return !converts_ && !recasts_ && change_.leaving.empty() && change_.parting.empty() && !change_.classes && !change_.encoding;
}

bool GroupEdit::is_leaving(size_t index) const { return std::ranges::find(change_.leaving, index) != change_.leaving.end(); }

GroupEdit GroupEdit::prepare(const ParamGroup& group, GroupChange change) {
  const BelowResidency below;
  const auto& parts = group.parts();
  GroupEdit edit(parts, std::move(change));
  if (edit.is_empty()) return edit;
  edit.lay_out(parts);
  auto terms = group.unsharder().inputs().terms();
  for (const size_t i : edit.change_.leaving) terms.extensions[i] = nullptr;
  if (const auto& form = edit.change_.encoding) terms.extensions[form->index] = form->extension;
  edit.encoded_ = AllGatherInputs::plan_with(std::move(terms), parts, edit.new_layout(parts), edit.dtypes_.stored);
  if (edit.moves_rows(parts))
    edit.make_rows(parts);
  else
    edit.part_rows(parts);
  edit.reduced_in_ = group.gradients().dtypes.decide(edit.dtypes_, edit.change_.leaving);
  edit.make_gradients(group);
  return edit;
}

void GroupEdit::lay_out(const GroupParts& parts) {
  auto& comm = parts.shard_group();
  const bool is_flat = parts.config.layout == ParamLayout::kFlat;
  auto itemsizes = dtypes_.itemsizes;
  if (change_.encoding && parts.identity.mesh_info.shard_size() > 1) itemsizes[change_.encoding->index].gathered = 0;
  if (converts_ || recasts_ || change_.encoding) layout_ = parts.layout.with_itemsizes(itemsizes, comm);
  // A flat run stays as it is cut: closing its gaps would take communication.
  std::vector<size_t> vacant;
  if (parts.shard.bytes().defined() && !is_flat)
    for (const size_t i : change_.leaving)
      if (parts.layout.stored_bytes(i) > 0) vacant.push_back(i);
  if (!vacant.empty()) layout_ = new_layout(parts).without(vacant, comm);
  if (change_.classes && !is_flat) layout_ = new_layout(parts).reordered(whole_order(*change_.classes, parts), comm);
}

bool GroupEdit::moves_rows(const GroupParts& parts) const {
  if (converts_ || change_.classes) return true;
  return std::ranges::any_of(change_.leaving,
                             [&](size_t i) { return new_layout(parts).stored_bytes(i) < parts.layout.stored_bytes(i); });
}

void GroupEdit::make_rows(const GroupParts& parts) {
  const auto& layout = new_layout(parts);
  shard_ = parts.shard.make(layout.stored().rank_bytes(), device_);
  const bool has_values = !device_.is_meta() && !parts.config.device.is_meta();
  for (size_t i = 0; i < parts.params.size(); ++i) {
    const auto& param = parts.params[i];
    const auto piece = shard_.narrow(0, layout.stored_offset(i), layout.stored_bytes(i));
    pieces_.push_back(piece);
    // What a parameter leaves behind in a flat run is padding from now on: zero.
    if (!has_values || param.has_moved_away || is_leaving(i)) continue;
    const auto numel = param.spec.local_bytes() / static_cast<int64_t>(c10::elementSize(param.spec.dtype));
    if (numel > 0)
      piece.view(dtypes_.stored[i])
          .narrow(0, 0, numel)
          .copy_(parts.shard.piece(i).view(param.spec.dtype).narrow(0, 0, numel));
  }
}

/// Of one rank: a piece may be memory of its own, where its parameter lay before fully_shard.
void GroupEdit::part_rows(const GroupParts& parts) {
  const bool frees = !parts.shard.bytes().defined() && !change_.leaving.empty();
  if (change_.parting.empty() && !frees) return;
  shard_ = parts.shard.bytes();
  pieces_ = parts.shard.pieces();
  for (const size_t i : change_.parting) pieces_[i] = pieces_[i].clone();
  if (!frees) return;
  for (const size_t i : change_.leaving) pieces_[i] = at::empty({0}, pieces_[i].options());
}

void GroupEdit::make_gradients(const ParamGroup& group) {
  const auto& parts = group.parts();
  const auto home = parts.shard.home_of(device_);
  for (size_t i = 0; i < parts.params.size(); ++i) {
    const auto& param = parts.params[i];
    gradients_.sharded.push_back(converts_ ? converted_gradient(param, home, dtypes_.stored[i]) : at::Tensor());
    gradients_.unsharded.push_back(converted_unreduced(param, device_, dtypes_.gathered[i]));
  }
  if (converts_) make_sums(group);
  const auto* classes = change_.classes ? change_.classes.get() : parts.local_shards.get();
  if (classes == nullptr || !have_gradients(parts.params) || device_.is_meta() || !shard_.defined()) return;
  const auto& dtypes = group.gradients().dtypes;
  for (const auto& one : classes->all()) {
    const size_t first = one.members.front();
    const auto dtype = dtypes.kept_dtype(parts.params[first], dtypes_.stored[first]).value_or(reduced_in_.reduced[first]);
    const int64_t bytes = LocalShards::extent_of(one, new_layout(parts)).bytes;
    const int64_t numel = bytes / static_cast<int64_t>(c10::elementSize(dtypes_.stored[first]));
    auto& made = gradients_.of_classes.emplace_back();
    if (one.is_trainable) made = at::zeros({numel}, parts.shard.options(dtype, device_));
  }
}

/// What waits for a reduction.
void GroupEdit::make_sums(const ParamGroup& group) {
  const auto& parts = group.parts();
  const auto& store = group.gradients().store;
  const auto in = [&](size_t i, const at::Tensor& sum) {
    if (!sum.defined()) return sum;
    const bool follows = !parts.config.mp_policy.reduce_dtype && at::isFloatingType(sum.scalar_type()) &&
                         !group.gradients().dtypes.takes_any(i);
    return converted(sum, device_, follows ? reduced_in_.reduced[i] : sum.scalar_type());
  };
  for (size_t i = 0; i < parts.params.size(); ++i) {
    gradients_.partial_sums.push_back(in(i, store.partial_sum(i)));
    gradients_.accumulated.push_back(in(i, store.accumulated(i)));
  }
}

void GroupEdit::commit(ParamGroup& group) && {
  const BelowResidency below;
  auto& parts = group.parts();
  if (change_.computes_in_own_dtype) parts.computes_in_own_dtype = *change_.computes_in_own_dtype;
  if (is_empty()) return;
  parts.config.device = device_;
  parts.is_cast = dtypes_.is_cast;
  commit_params(group);
  commit_form(group);
  commit_gradients(group);
  if (change_.classes) parts.local_shards = std::move(change_.classes);
  if (!pieces_.empty()) {
    parts.shard.set(std::move(shard_), std::move(pieces_));
    if (parts.local_shards) parts.local_shards->give_gradients(std::move(gradients_.of_classes));
    refresh_classes(group);
  }
  group.unsharder().rest();
}

void GroupEdit::commit_params(ParamGroup& group) {
  auto& parts = group.parts();
  const auto owner = parts.owner().shared_from_this();
  for (size_t i = 0; i < parts.params.size(); ++i) {
    auto& param = parts.params[i];
    if (is_leaving(i)) {
      param.move_away();
    } else if (converts_) {
      param.convert(dtypes_.stored[i], dtypes_.gathered[i], pieces_[i], owner, device_);
      if (gradients_.sharded[i].defined()) param.local_tensor().mutable_grad() = gradients_.sharded[i];
    } else {
      const bool moves = !pieces_.empty() && !pieces_[i].is_same(parts.shard.piece(i));
      if (moves && param.local_tensor().defined()) param.make_sharded_param(parts.link, i, pieces_[i]);
      if (dtypes_.gathered[i] == param.spec.param_dtype) continue;
      param.set_param_dtype(dtypes_.gathered[i], owner, device_);
    }
    const auto& unreduced = gradients_.unsharded[i];
    if (unreduced.defined() && !is_leaving(i)) accumulated_grad(param.unsharded_param()) = unreduced;
  }
}

void GroupEdit::commit_form(ParamGroup& group) {
  auto& form = group.unsharder().inputs();
  for (const size_t i : change_.leaving) form.set_extension(i, nullptr);
  if (change_.encoding) form.set_extension(change_.encoding->index, change_.encoding->extension);
  if (layout_) group.parts().layout = std::move(*layout_);
  group.unsharder().set_encoded(std::move(encoded_));
}

void GroupEdit::commit_gradients(ParamGroup& group) {
  auto& gradients = group.gradients();
  if (!change_.leaving.empty()) gradients.store.reset();
  if (converts_ || !change_.leaving.empty()) group.changes().count_trainable();  // converting takes over what had been toggled
  gradients.dtypes.set(std::move(reduced_in_));
  for (size_t i = 0; i < gradients_.partial_sums.size(); ++i) {
    gradients.store.partial_sum(i) = gradients_.partial_sums[i];
    gradients.store.accumulated(i) = gradients_.accumulated[i];
  }
}

}  // namespace fsdp
