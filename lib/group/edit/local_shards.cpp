#include "group/edit/local_shards.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/raw_view.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "param/replace_tensor.hpp"

namespace fsdp {

std::vector<LocalShards::Class> LocalShards::plan(const ParamGroup& group,
                                                    const std::vector<std::string>& labels) {
  std::vector<Class> classes;
  for (const size_t i : group.parts().layout.order()) {
    const auto& param = group.params()[i];
    if (param.has_moved_away) continue;
    auto known = std::find_if(classes.begin(), classes.end(), [&](const Class& one) {
      return one.label == labels[i] && one.dtype == param.spec.dtype &&
             group.params()[one.members.front()].grad_dtype() == param.grad_dtype() &&
             one.is_trainable == param.requires_grad() &&
             group.params()[one.members.front()].spec.reach.summed_over == param.spec.reach.summed_over;
    });
    if (known == classes.end())
      known = classes.insert(known, {.label = labels[i], .dtype = param.spec.dtype,
                                     .is_trainable = param.requires_grad()});
    known->members.push_back(i);
  }
  return classes;
}

LocalShards::LocalShards(std::vector<Class> classes, std::vector<std::string> labels)
    : classes_(std::move(classes)), labels_(std::move(labels)), class_of_(labels_.size()) {
  for (size_t c = 0; c < classes_.size(); ++c)
    for (const size_t i : classes_[c].members) class_of_[i] = c;
}

std::vector<size_t> LocalShards::order() const {
  std::vector<size_t> order;
  for (const auto& one : classes_) order.insert(order.end(), one.members.begin(), one.members.end());
  return order;
}

LocalShards::ClassExtent LocalShards::extent_of(const Class& one, const GroupLayout& layout) {
  int64_t begin = layout.stored().rank_bytes(), end = 0;
  for (const size_t i : one.members) {
    const int64_t bytes = layout.stored_bytes(i);
    if (bytes == 0) continue;
    begin = std::min(begin, layout.stored_offset(i));
    end = std::max(end, layout.stored_offset(i) + bytes);
  }
  return end > 0 ? ClassExtent{begin, end - begin} : ClassExtent{};
}

void LocalShards::give_gradients(std::vector<at::Tensor> memory) {
  for (size_t c = 0; c < memory.size(); ++c) classes_[c].next_gradient = std::move(memory[c]);
}

void LocalShards::point_into(ParamGroup& group, const at::Tensor& memory) {
  BelowResidency below;
  const auto& parts = group.parts();
  for (size_t c = 0; c < classes_.size(); ++c) {
    auto& one = classes_[c];
    one.dtype = parts.params[one.members.front()].spec.dtype;
    const auto extent = extent_of(one, parts.layout);
    const auto itemsize = static_cast<int64_t>(c10::elementSize(one.dtype));
    one.begin = extent.begin / itemsize;
    one.numel = extent.bytes / itemsize;
    auto* data = memory.is_meta() ? nullptr
                                  : static_cast<char*>(memory.mutable_data_ptr()) + one.begin * itemsize;
    auto storage = c10::make_intrusive<ShardStorage>(parts.link, parts.params.size() + c, one.numel * itemsize,
                                                          data, memory.storage(), memory.device());
    auto shard = at::empty({0}, at::TensorOptions().dtype(one.dtype).device(memory.device()));
    shard.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(storage)));
    shard.unsafeGetTensorImpl()->set_sizes_contiguous({one.numel});
    if (one.shard.defined()) {
      one.shard.mutable_grad().reset();
      replace_tensor(one.shard, shard);
    } else {
      one.shard = std::move(shard);
    }
    one.shard.set_requires_grad(one.is_trainable);
    set_grad_dtype(one.shard, parts.params[one.members.front()].grad_dtype());
    add_residency_key(one.shard);
    one.gradient.reset();
  }
}

at::Tensor LocalShards::place(const ParamGroup& group, size_t param) const {
  const auto& one = class_of(param);
  const auto& layout = group.params()[param].layout();
  const int rank = group.identity().mesh_info.shard_rank();
  const int64_t offset = group.parts().layout.stored_offset(param) / static_cast<int64_t>(c10::elementSize(one.dtype));
  const bool is_empty = layout.local_numel(rank) == 0;
  return raw_view(one.gradient, layout.local_sizes(rank), layout.local_strides(rank), is_empty ? 0 : offset - one.begin);
}

bool LocalShards::is_in_place(const ParamGroup& group, const Class& one, size_t param) const {
  const auto gradient = group.params()[param].local_tensor().grad();
  return gradient.defined() && one.gradient.defined() && gradient.is_alias_of(one.gradient);
}

void LocalShards::settle(ParamGroup& group, size_t param) {
  if (is_in_place(group, class_of(param), param)) return;
  const auto there = place(group, param);
  auto& gradient = group.params()[param].local_tensor().mutable_grad();
  there.copy_(gradient);
  gradient = there;
}

void LocalShards::refresh(ParamGroup& group) {
  BelowResidency below;
  for (auto& one : classes_) {
    if (!one.is_trainable) continue;
    const bool is_ours = one.gradient.defined() && one.shard.grad().defined() &&
                         one.shard.grad().is_alias_of(one.gradient);
    if (!is_ours) begin_gradient(group, one);
    for (const size_t i : one.members) {
      const auto local_tensor = group.params()[i].local_tensor();
      if (!local_tensor.defined()) continue;
      if (local_tensor.grad().defined())
        settle(group, i);
      else if (is_ours)
        place(group, i).zero_();  // it was reset
    }
  }
}

void LocalShards::begin_gradient(ParamGroup& group, Class& one) {
  // Its views go with a gradient that was reset; what the user gave to a parameter himself stays.
  for (const size_t i : one.members)
    if (is_in_place(group, one, i)) group.params()[i].local_tensor().mutable_grad().reset();
  const auto given = one.shard.grad();
  one.gradient = std::exchange(one.next_gradient, {});
  if (!one.gradient.defined()) {
    const auto& parts = group.parts();
    const auto& dtypes = group.gradients().dtypes;
    const size_t first = one.members[0];
    const auto dtype = dtypes.kept_dtype(first).value_or(dtypes.reduce_dtype(first));
    one.gradient = at::zeros({one.numel}, parts.shard.options(dtype, parts.config.device));
  }
  if (given.defined()) one.gradient.copy_(given);
  one.shard.mutable_grad() = one.gradient;
}

void LocalShards::drop_gradients() {
  for (auto& one : classes_) {
    one.shard.mutable_grad().reset();
    one.gradient.reset();
  }
}

void LocalShards::check_requires_grad(std::span<const FSDPParam> params) const {
  for (const auto& one : classes_)
    for (const size_t i : one.members) {
      const auto& param = params[i];
      const auto unsharded_param = param.unsharded_param(), local_tensor = param.sharded_param();
      const bool is_toggled = (unsharded_param.defined() && unsharded_param.requires_grad() != one.is_trainable) ||
                              (local_tensor.defined() && local_tensor.requires_grad() != one.is_trainable);
      require_state(!is_toggled,
                    "{}: its requires_grad was set to {} after fsdp::local_shards put it into one tensor of parameters that "
                    "are {}; set it back, or freeze parameters before local_shards",
                    param.name(), !one.is_trainable, one.is_trainable ? "trainable" : "frozen");
    }
}

void LocalShards::check_grad_dtypes(std::span<const FSDPParam> params) const {
  for (const auto& one : classes_)
    for (const size_t i : one.members)
      require_state(params[i].grad_dtype() == grad_dtype_of(one.shard),
                    "{}: its grad_dtype was changed after fsdp::local_shards put it into one tensor with others; set it back, "
                    "or set it before local_shards",
                    params[i].name());
}

bool have_gradients(std::span<const FSDPParam> params) {
  return std::ranges::any_of(params, [](const FSDPParam& param) {
    const auto local_tensor = param.local_tensor();
    return local_tensor.defined() && local_tensor.grad().defined();
  });
}

void refresh_classes(ParamGroup& group) {
  const auto& classes = group.parts().local_shards;
  if (!classes) return;
  const auto& shard = group.parts().shard.bytes();
  classes->point_into(group, shard);
  if (have_gradients(group.params()) && !shard.is_meta()) classes->refresh(group);
}

}  // namespace fsdp
