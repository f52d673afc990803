#include "base/require.hpp"
#include "group/group_conversion.hpp"
#include "group/param_group.hpp"
#include "group/reduce/unreduced_gradients.hpp"
#include "group/root_context.hpp"
#include "param/residency.hpp"

// full_precision_in_eval (T8): a group that computes in param_dtype while its module trains, and in the
// parameters' own dtype while it does not. Handles stay the same tensors; only between steps do they
// change, so that what autograd saved in a step is of the step's dtype.
namespace fsdp {

void ParamGroup::check_mode() const {
  if (!wants_own_dtype || wants_own_dtype() == computes_in_own_dtype_) return;
  throw StateError(fmt::format(
      "'{}' went from {} in the middle of a step, which full_precision_in_eval cannot follow. Run the "
      "backward of the last forward first, or reset_iter_state(); a forward without backward belongs "
      "under torch::NoGradGuard or fsdp::forward_scope",
      name(), computes_in_own_dtype_ ? "eval to training mode" : "training to eval mode"));
}

void ParamGroup::follow_mode() {
  const auto root = context;
  std::lock_guard lock(root->mutex());
  root->take_over_modes();
}

void ParamGroup::compute_in_own_dtype(bool value) {
  if (value == computes_in_own_dtype_) return;
  BelowResidency below;
  const auto made = dtypes_in(*this, /*floating=*/std::nullopt, value);
  mark_not_ready();
  computes_in_own_dtype_ = value;
  if (!made.changes) return;

  take_changes();
  context->reshard(*this);
  // Sums that wait for a reduction stay in the dtype that they are added up in.
  accumulate_in_reduce_dtype(*this);
  set_layout(layout().with_itemsizes(made.itemsizes, parts_.shard_group()));
  for (size_t i = 0; i < params().size(); ++i)
    if (made.gathered[i] != params()[i].param_dtype())
      params()[i].set_param_dtype(made.gathered[i], shared_from_this(), config().device);
  parts_.is_cast = made.is_cast;
  gradient_dtypes_.plan();
  unsharder_.rest();
  context->facts_changed(*this);
}

}  // namespace fsdp
