#include <ATen/ATen.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "group/param_group.hpp"
#include "group/root_context.hpp"
#include "param/residency.hpp"

// Other dtypes and devices for parameters that are sharded already (A9), and memory for those that
// were sharded on the meta device (A3).
namespace fsdp {

namespace {

at::Tensor converted(const at::Tensor& tensor, c10::Device device, at::ScalarType dtype) {
  // What was on meta had no values, and what goes there keeps none.
  if (!tensor.defined() || tensor.is_meta() || device.is_meta()) return {};
  return tensor.detach().to(device, dtype);
}

}  // namespace

struct ParamGroup::Remade {
  c10::Device device;
  Dtypes dtypes;
  GroupLayout layout = {};
  std::unique_ptr<WireGather> wire = {};
  at::Tensor shard = {};
  std::vector<at::Tensor> pieces = {};
  std::vector<at::Tensor> gradients = {};         // of the registered parameters
  std::vector<at::Tensor> handle_gradients = {};  // not reduced yet
};

/// floating: that floating-point parameters are to be kept in; none: as they are.
ParamGroup::Dtypes ParamGroup::dtypes_in(std::optional<at::ScalarType> floating, bool in_own_dtype) const {
  Dtypes made;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = params_[i];
    const auto stored = at::isFloatingType(param.dtype()) ? floating.value_or(param.dtype()) : param.dtype();
    const auto gathered = in_own_dtype ? stored : asked_dtypes_[i].value_or(stored);
    made.stored.push_back(stored);
    made.gathered.push_back(gathered);
    made.itemsizes.push_back({.stored = static_cast<int64_t>(c10::elementSize(stored)),
                              .gathered = static_cast<int64_t>(c10::elementSize(gathered))});
    made.is_cast |= gathered != stored;
    made.changes |= stored != param.dtype() || gathered != param.param_dtype();
  }
  return made;
}

void ParamGroup::check_convertible(const GroupConversion& to) const {
  require_state(!context->steps_are_held(),
                "'{}' shows full parameters (fsdp::FullParameters); end that scope before changing its dtype "
                "or device",
                name());
  // Parameters without values take part in no step, though a use of them may have begun one.
  require_state(
      context->is_quiescent() || config_.device.is_meta(),
      "'{}' is in the middle of a step; change its dtype or device before forward or after "
      "backward (after an exception, call reset_iter_state() on the root first)",
      name());
  for (const auto& param : params_) param.check_handle();
  if (to.dtype) check_extensions(dtypes_in(to.dtype, computes_in_own_dtype_).stored);
}

ParamGroup::Remade ParamGroup::remake(const GroupConversion& to) const {
  Remade made{.device = to.device.value_or(config_.device),
              .dtypes = dtypes_in(to.dtype, computes_in_own_dtype_)};
  made.dtypes.changes |= made.device != config_.device;
  if (!made.dtypes.changes) return made;

  made.layout = layout_.with_itemsizes(made.dtypes.itemsizes, *identity.mesh_info.shard_group);
  made.shard = make_shard(made.layout.stored().rank_bytes(), made.device);
  made.wire = make_wire(made.layout, made.dtypes.stored);
  fill(made);
  return made;
}

void ParamGroup::fill(Remade& made) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = params_[i];
    const auto dtype = made.dtypes.stored[i];
    const auto piece = made.shard.narrow(0, made.layout.stored_offset(i), made.layout.stored_bytes(i));
    const auto numel = param.local_bytes() / static_cast<int64_t>(c10::elementSize(param.dtype()));
    if (numel > 0 && !made.device.is_meta() && !config_.device.is_meta())
      piece.view(dtype)
          .narrow(0, 0, numel)
          .copy_(pieces_[i].view(param.dtype()).narrow(0, 0, numel));
    made.pieces.push_back(piece);

    const auto registered = param.registered(), handle = param.handle();
    const auto gradient = registered.defined() ? registered.grad() : at::Tensor();
    // One that was left in the reduce dtype stays in it, and so does one whose dtype was asked for.
    const bool follows =
        gradient.defined() && gradient.scalar_type() == param.dtype() && !param.grad_dtype().is_set;
    made.gradients.push_back(converted(
        gradient, made.shard.device(), follows || !gradient.defined() ? dtype : gradient.scalar_type()));
    const auto unreduced = handle.defined() ? handle.grad() : at::Tensor();
    const bool stays = unreduced.defined() && grad_dtype_of(handle).takes_any();
    made.handle_gradients.push_back(
        converted(unreduced, made.device, stays ? unreduced.scalar_type() : made.dtypes.gathered[i]));
  }
}

void ParamGroup::convert_waiting_gradients(c10::Device device) {
  for (size_t i = 0; i < params_.size(); ++i)
    for (auto* sum : {&tally.partial_sum(i), &tally.accumulated(i)}) {
      if (!sum->defined()) continue;
      const bool follows =
          !config_.mp_policy.reduce_dtype && at::isFloatingType(sum->scalar_type());
      *sum = converted(*sum, device, follows ? reduce_dtype(i, sum->scalar_type()) : sum->scalar_type());
    }
}

void ParamGroup::convert(const GroupConversion& to) {
  const auto root = context;
  std::lock_guard lock(root->mutex());
  check_convertible(to);
  BelowResidency below;
  sync_grad_dtypes();
  for (size_t i = 0; i < params_.size() && !config_.device.is_meta(); ++i) {
    try {
      params_[i].bring_home(pieces_[i]);
    } catch (const StateError& error) {
      // LibTorch's own to(), tried before this one and told of; the old values are back.
      log().info("{}", error.what());
    }
  }
  auto made = remake(to);
  if (!made.dtypes.changes) return;

  // From here on nothing fails.
  root->reshard(*this);
  drop_post_forward_shard();
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    param.convert(made.dtypes.stored[i], made.dtypes.gathered[i], made.pieces[i], shared_from_this(), made.device);
    if (made.gradients[i].defined()) param.registered().mutable_grad() = made.gradients[i];
    if (made.handle_gradients[i].defined())
      param.handle().mutable_grad() = made.handle_gradients[i];
  }
  config_.device = made.device;
  layout_ = std::move(made.layout);
  wire_ = std::move(made.wire);
  kept_.reset();
  sent_.clear();
  is_cast_ = made.dtypes.is_cast;
  shard_ = std::move(made.shard);
  pieces_ = std::move(made.pieces);
  count_trainable();  // converting took over what had been toggled
  plan_gradient_dtypes();
  convert_waiting_gradients(config_.device);
  root->budget().invalidate();
  refresh_classes();
  show_pieces();
  mark_not_ready();
}

}  // namespace fsdp
