#include "root/group_conversion.hpp"

#include <ATen/ATen.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "group/shard_rows.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// What a conversion makes before it changes anything.
struct Converted {
  c10::Device device;
  ParamDtypes dtypes;
  GroupLayout layout = {};
  std::unique_ptr<EncodedGather> encoded = {};
  at::Tensor shard = {};
  std::vector<at::Tensor> pieces = {};
  std::vector<at::Tensor> gradients = {};         // of the sharded parameters
  std::vector<at::Tensor> unsharded_gradients = {};  // not reduced yet
};

at::Tensor converted(const at::Tensor& tensor, c10::Device device, at::ScalarType dtype) {
  // What was on meta had no values, and what goes there keeps none.
  if (!tensor.defined() || tensor.is_meta() || device.is_meta()) return {};
  return tensor.detach().to(device, dtype);
}

void copy_rows(const GroupParts& parts, Converted& made) {
  const bool has_values = !made.device.is_meta() && !parts.config.device.is_meta();
  for (size_t i = 0; i < parts.params.size(); ++i) {
    const auto& param = parts.params[i];
    const auto piece = made.shard.narrow(0, made.layout.stored_offset(i), made.layout.stored_bytes(i));
    const auto numel = param.spec.local_bytes() / static_cast<int64_t>(c10::elementSize(param.spec.dtype));
    if (numel > 0 && has_values)
      piece.view(made.dtypes.stored[i])
          .narrow(0, 0, numel)
          .copy_(parts.shard.piece(i).view(param.spec.dtype).narrow(0, 0, numel));
    made.pieces.push_back(piece);
  }
}

void convert_gradients(const GroupParts& parts, Converted& made) {
  for (size_t i = 0; i < parts.params.size(); ++i) {
    const auto& param = parts.params[i];
    const auto sharded_param = param.sharded_param(), unsharded_param = param.unsharded_param();
    const auto gradient = sharded_param.defined() ? sharded_param.grad() : at::Tensor();
    // One that was left in the reduce dtype stays in it, and so does one whose dtype was asked for.
    const bool follows =
        gradient.defined() && gradient.scalar_type() == param.spec.dtype && !param.grad_dtype().is_set;
    made.gradients.push_back(
        converted(gradient, made.shard.device(),
                  follows || !gradient.defined() ? made.dtypes.stored[i] : gradient.scalar_type()));
    const auto unreduced = unsharded_param.defined() ? accumulated_grad(unsharded_param) : at::Tensor();
    const bool stays = unreduced.defined() && grad_dtype_of(unsharded_param).takes_any();
    made.unsharded_gradients.push_back(
        converted(unreduced, made.device, stays ? unreduced.scalar_type() : made.dtypes.gathered[i]));
  }
}

Converted make_converted(const ParamGroup& group, const GroupConversion& to) {
  const auto& parts = group.parts();
  Converted made{.device = to.device.value_or(parts.config.device),
                 .dtypes = dtypes_in(group, to.dtype, parts.eval_precision.is_own_dtype())};
  made.dtypes.changes |= made.device != parts.config.device;
  if (!made.dtypes.changes) return made;

  made.layout = parts.layout.with_itemsizes(made.dtypes.itemsizes, parts.shard_group());
  made.shard = parts.shard.make(made.layout.stored().rank_bytes(), made.device);
  made.encoded = group.unsharder().form().plan(parts, made.layout, made.dtypes.stored);
  copy_rows(parts, made);
  convert_gradients(parts, made);
  return made;
}

void convert_waiting_gradients(ParamGroup& group) {
  const auto& config = group.parts().config;
  auto& gradients = group.gradients();
  for (size_t i = 0; i < group.params().size(); ++i)
    for (auto* sum : {&gradients.store.partial_sum(i), &gradients.store.accumulated(i)}) {
      if (!sum->defined()) continue;
      const bool follows = !config.mp_policy.reduce_dtype && at::isFloatingType(sum->scalar_type());
      *sum = converted(*sum, config.device,
                       follows ? gradients.dtypes.reduce_dtype(i, sum->scalar_type()) : sum->scalar_type());
    }
}

/// Nothing of it fails.
void set_converted(ParamGroup& group, Converted made) {
  auto& parts = group.parts();
  const auto owner = parts.owner().shared_from_this();
  for (size_t i = 0; i < parts.params.size(); ++i) {
    auto& param = parts.params[i];
    param.convert(made.dtypes.stored[i], made.dtypes.gathered[i], made.pieces[i], owner, made.device);
    if (made.gradients[i].defined()) param.sharded_param().mutable_grad() = made.gradients[i];
    if (made.unsharded_gradients[i].defined()) accumulated_grad(param.unsharded_param()) = made.unsharded_gradients[i];
  }
  parts.config.device = made.device;
  parts.layout = std::move(made.layout);
  parts.is_cast = made.dtypes.is_cast;
  parts.shard.set(std::move(made.shard), std::move(made.pieces));
  group.unsharder().set_encoded(std::move(made.encoded));
}

}  // namespace

ParamDtypes dtypes_in(const ParamGroup& group, std::optional<at::ScalarType> floating, bool in_own_dtype) {
  ParamDtypes made;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& param = group.params()[i];
    const auto stored = at::isFloatingType(param.spec.dtype) ? floating.value_or(param.spec.dtype) : param.spec.dtype;
    const auto gathered = in_own_dtype ? stored : param.spec.asked_param_dtype.value_or(stored);
    made.stored.push_back(stored);
    made.gathered.push_back(gathered);
    made.itemsizes.push_back({.stored = static_cast<int64_t>(c10::elementSize(stored)),
                              .gathered = static_cast<int64_t>(c10::elementSize(gathered))});
    made.is_cast |= gathered != stored;
    made.changes |= stored != param.spec.dtype || gathered != param.spec.param_dtype;
  }
  return made;
}

void check_convertible(const ParamGroup& group, const GroupConversion& to) {
  const auto& parts = group.parts();
  require_state(!root_of(group).step().is_pinned(),
                "'{}' shows full parameters (fsdp::FullParameters); end that scope before changing its dtype "
                "or device",
                group.name());
  // Parameters without values take part in no step, though a use of them may have begun one.
  require_state(
      root_of(group).is_quiescent() || parts.config.device.is_meta(),
      "'{}' is in the middle of a step; change its dtype or device before forward or after "
      "backward (after an exception, call reset_iter_state() on the root first)",
      group.name());
  for (const auto& param : parts.params) param.unsharded.check(param.name());
  if (to.dtype)
    group.unsharder().form().check(parts, dtypes_in(group, to.dtype, parts.eval_precision.is_own_dtype()).stored);
}

void convert(ParamGroup& group, const GroupConversion& to) {
  const auto root = GroupPort::of(group).root();
  std::lock_guard lock(root->mutex());
  check_convertible(group, to);
  BelowResidency below;
  group.changes().sync_grad_dtypes();
  for (size_t i = 0; i < group.params().size() && !group.parts().config.device.is_meta(); ++i) {
    try {
      group.params()[i].reset_sharded_param(group.parts().shard.piece(i));
    } catch (const StateError& error) {
      // LibTorch's own to(), tried before this one and told of; the old values are back.
      log().info("{}", error.what());
    }
  }
  auto made = make_converted(group, to);
  if (!made.dtypes.changes) return;

  root->control(group, GroupEvent::kUserReshards);
  set_converted(group, std::move(made));
  group.changes().count_trainable();  // converting took over what had been toggled
  group.gradients().dtypes.plan();
  convert_waiting_gradients(group);
  refresh_classes(group);
  group.unsharder().rest();
  root->runner().facts_changed(group);
  GroupPort::of(group).mark_not_ready();
}

void compute_in_own_dtype(ParamGroup& group, bool value) {
  auto& parts = group.parts();
  if (value == parts.eval_precision.is_own_dtype()) return;
  BelowResidency below;
  const auto made = dtypes_in(group, /*floating=*/std::nullopt, value);
  GroupPort::of(group).mark_not_ready();
  parts.eval_precision.set_own_dtype(value);
  if (!made.changes) return;

  group.changes().refresh();
  root_of(group).control(group, GroupEvent::kUserReshards);
  // Sums that wait for a reduction stay in the dtype that they are added up in.
  group.gradients().store.accumulate(group.gradients().dtypes);
  set_layout(group, parts.layout.with_itemsizes(made.itemsizes, parts.shard_group()));
  for (size_t i = 0; i < parts.params.size(); ++i)
    if (made.gathered[i] != parts.params[i].spec.param_dtype)
      parts.params[i].set_param_dtype(made.gathered[i], parts.owner().shared_from_this(), parts.config.device);
  parts.is_cast = made.is_cast;
  group.gradients().dtypes.plan();
  group.unsharder().rest();
  root_of(group).runner().facts_changed(group);
}

}  // namespace fsdp
