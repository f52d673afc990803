#include "group/reduce/sharded_grads.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/mean_over_ranks.hpp"
#include "group/reduce/partial_sums.hpp"
#include "group/reduce/user_hooks.hpp"
#include "param/unsharded_keeper.hpp"

namespace fsdp {

namespace {

/// LibTorch puts a user's first hook in the place of what was there, so counting them says nothing.
bool is_user_hook(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) {
  return dynamic_cast<const UnshardedKeeper*>(hook.get()) == nullptr;
}

/// User hooks on what is registered, which autograd itself never reaches: they see the reduced gradient, in the parameter's
/// form.
at::Tensor run_gradient_hooks(const FSDPParam& param, at::Tensor gradient) {
  const auto& placed = param.spec.dtensor;
  if (placed) gradient = make_dtensor(gradient, placed, WholeStorage::Message::kFull);
  for (auto& hook : torch::autograd::impl::hooks(param.sharded_param())) {
    if (!is_user_hook(hook)) continue;
    auto result = (*hook)({gradient});
    if (!result.empty() && result[0].defined()) gradient = result[0];
  }
  if (const auto& shared = param.sharded.shared()) gradient = shared->accumulator_hooks().run_before(std::move(gradient));
  if (!placed) return gradient;
  const auto* dtensor = DTensorImpl::of(gradient);
  if (dtensor != nullptr && dtensor->has_piece() && dtensor->spec().is_placed_as(*placed)) return dtensor->local();
  return copy_part_of(*placed, whole_of(gradient, "gradient hook"));
}

bool has_post_accumulate_hook(const at::Tensor& sharded_param) {
  return torch::autograd::impl::post_acc_grad_hooks(sharded_param) != nullptr;
}

bool has_accumulator_hooks(const FSDPParam& param) {
  const auto& shared = param.sharded.shared();
  return shared != nullptr && shared->accumulator_hooks().has_any();
}

/// A user's hook in the middle of the runtime's work: what it reads is gathered, what it writes is seen, as in any other
/// hook of a backward.
class UserHook {
 public:
  UserHook(UserHooks& told, const ParamGroup& group, std::optional<BelowResidency>& below) : told_(told), below_(below) {
    below_.reset();
    no_grad_.emplace();
    told_.begin_user_hook(group);
  }
  ~UserHook() {
    told_.end_user_hook();
    no_grad_.reset();
    below_.emplace();
  }
  UserHook(const UserHook&) = delete;
  UserHook& operator=(const UserHook&) = delete;

 private:
  UserHooks& told_;
  std::optional<BelowResidency>& below_;
  std::optional<at::NoGradGuard> no_grad_;
};

/// A gradient on the device, where the user is to find it. target: write it there; undefined: in memory of its own where
/// gradients live on the host, and as it is elsewhere.
at::Tensor offload_grad(GroupParts& parts, const at::Tensor& gradient, bool may_overlap, const at::Tensor& target) {
  const auto& host_memory = parts.config.host_memory;
  if (!host_memory && !target.defined()) return gradient;
  const Range range(parts.comm_ctx->trace, "FSDP::gradient_copy", parts.identity);
  auto& statistics = parts.comm_ctx->meter.total();
  auto there = target;
  if (!there.defined()) {
    there = at::empty_strided(gradient.sizes(), gradient.strides(), host_memory->options(gradient.scalar_type()));
    statistics.buffer_bytes += static_cast<int64_t>(there.nbytes());
  }
  if (host_memory) statistics.offloaded_bytes += static_cast<int64_t>(gradient.nbytes());
  parts.shard.copy(gradient, there, may_overlap);
  return there;
}

/// A parameter with hooks behind its gradient, and the summand that it has just got, if its accumulator has any.
using Hooked = std::pair<size_t, at::Tensor>;

/// When all gradients of the group are there, in the order of its parameters; of those that have got one.
void run_hooks_behind(const ParamGroup& group, std::vector<Hooked> hooked, UserHooks* hooks,
                      std::optional<BelowResidency>& below) {
  std::ranges::sort(hooked, {}, &Hooked::first);
  for (const auto& [index, gradient] : hooked) {
    const auto& param = group.params()[index];
    const auto sharded_param = param.sharded_param();
    // A hook before this one may have dropped the gradient.
    if (!sharded_param.defined() || !sharded_param.grad().defined()) continue;
    const UserHook user(*hooks, group, below);
    if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(sharded_param)) (*hook)(sharded_param);
    if (gradient.defined())
      param.sharded.shared()->accumulator_hooks().run_behind(
          make_dtensor(gradient, param.spec.dtensor, WholeStorage::Message::kFull));
  }
}

/// One group's gradients on their way to `.grad`.
class Assignment {
 public:
  Assignment(ParamGroup& group, UserHooks* hooks) : group_(group), hooks_(hooks) {}

  void assign(size_t index, at::Tensor gradient);
  /// Behind the group's last gradient.
  void end() { run_hooks_behind(group_, std::move(hooked_), hooks_, below_); }

 private:
  at::Tensor run_hooks(size_t index, at::Tensor gradient);

  ParamGroup& group_;
  UserHooks* hooks_;
  std::optional<BelowResidency> below_{std::in_place};
  std::vector<Hooked> hooked_;
};

at::Tensor Assignment::run_hooks(size_t index, at::Tensor gradient) {
  const auto& param = group_.params()[index];
  {
    const UserHook hook(*hooks_, group_, below_);
    gradient = run_gradient_hooks(param, std::move(gradient));
  }
  const bool is_passed = has_accumulator_hooks(param);
  if (is_passed || has_post_accumulate_hook(param.sharded_param()))
    hooked_.emplace_back(index, is_passed ? gradient : at::Tensor());
  return gradient;
}

void Assignment::assign(size_t index, at::Tensor gradient) {
  const auto& param = group_.params()[index];
  auto* local_tensor = param.sharded.peek();
  if (local_tensor == nullptr) return;  // nobody is left to use it
  if (const auto kept = kept_dtype(group_, index, gradient.scalar_type()); gradient.scalar_type() != kept)
    gradient = gradient.to(kept);
  auto* classes = group_.parts().local_shards.get();
  if (classes && !classes->is_trainable(index)) classes = nullptr;  // frozen since it got this gradient
  const bool has_hooks = has_user_hooks(param);
  const auto alive = has_hooks ? param.local_tensor() : at::Tensor();  // whatever a user's hook does
  auto* present = &local_tensor->mutable_grad();
  const bool is_first = !present->defined() && !has_hooks;
  // What the host is to read now cannot be on its way.
  if (!is_first) group_.parts().shard.wait_for_copies();
  gradient = offload_grad(group_.parts(), gradient, /*may_overlap=*/is_first,
                          is_first && classes ? classes->place(group_, index) : at::Tensor());
  if (has_hooks) gradient = run_hooks(index, std::move(gradient));
  // Good until somebody asks the DTensor.
  if (has_hooks || classes) present = &local_tensor->mutable_grad();
  if (present->defined()) {
    require_state(present->sizes() == local_tensor->sizes(),
                  "{}: its gradient was replaced by one of sizes {}, but this rank's rows have "
                  "sizes {}; assign this rank's rows, or reset it",
                  param.name(), fmt::join(present->sizes(), "x"),
                  fmt::join(local_tensor->sizes(), "x"));
    present->add_(gradient);
  } else {
    *present = std::move(gradient);
  }
  if (classes) classes->settle(group_, index);
}

}  // namespace

void assign_sharded_grads(ParamGroup& group, ReduceInputs& inputs, KeepsAlone keeps_alone, UserHooks* hooks) {
  Assignment assignment(group, hooks);
  auto& comm_ctx = *group.parts().comm_ctx;
  if (const auto& classes = group.parts().local_shards) {
    group.parts().shard.wait_for_copies();
    classes->refresh(group);
  }
  const double factor_alone = division_of(group, at::kFloat).after;
  for (auto& [index, gradient] : inputs.alone) {
    if (factor_alone != 1) gradient.div_(factor_alone);
    assignment.assign(index, keeps_alone == KeepsAlone::kYes ? gradient : std::move(gradient));
  }
  for (auto& bucket : inputs.buckets) {
    if (bucket.all_reduce) comm_ctx.trace.wait(Operation::kAllReduce, group.identity(), bucket.all_reduce);
    // A division, not a multiplication by the inverse, which would round thirds twice.
    if (const double factor = division_of(group, bucket.dtype).after; factor != 1 && !bucket.is_divided)
      comm_ctx.divisor.divide(bucket.reduce_scatter.output, factor);
    for (size_t i = 0; i < bucket.indices.size(); ++i)
      assignment.assign(bucket.indices[i], gradient_piece(group, bucket, i));
  }
  assignment.end();
}

// Asked of every parameter in every step: of the metadata itself, where LibTorch's functions look, too.
bool has_user_hooks(const FSDPParam& param) {
  const auto* sharded_param = param.sharded.peek_registered();
  const auto* meta = sharded_param == nullptr ? nullptr : sharded_param->autograd_meta();
  if (meta == nullptr) return false;
  const auto& fields = static_cast<const torch::autograd::AutogradMeta&>(*meta);
  // torch::autograd::grad has put the unsharded tensor's accumulator in the place of the one that a user keeps.
  const auto& shared = param.sharded.shared();
  return fields.post_acc_grad_hooks_ != nullptr || std::any_of(fields.hooks_.begin(), fields.hooks_.end(), is_user_hook) ||
         ((!fields.grad_accumulator_.expired() || (shared != nullptr && shared->knows_accumulators())) &&
          has_accumulator_hooks(param));
}

}  // namespace fsdp
