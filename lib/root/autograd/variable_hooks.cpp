#include <ATen/ATen.h>
#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/graph_task.h>

#include <optional>
#include <utility>

#include "base/require.hpp"
#include "dispatch/host_lock.hpp"
#include "dispatch/residency.hpp"
#include "dispatch/stand_in/data_alias.hpp"
#include "dispatch/stand_in/gradient_fork.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "dtensor/function_scope.hpp"
#include "param/grad_dtype.hpp"
#include "root/autograd/captured_gradient.hpp"
#include "root/autograd/left_gradients.hpp"
#include "root/autograd/set_data.hpp"
#include "root/edit/edit_group.hpp"
#include "root/find_param.hpp"
#include "root/group_port.hpp"

// Note [Methods of tensors that are no operators]
// `set_data`, `output_nr` and a few more pass no dispatcher, so the residency fallback does not see them. LibTorch
// sends them through one object of the process, which another stands in front of here: it looks at registered
// parameters and passes everything on.
namespace fsdp {

namespace {

using at::TensorBase;
using Interface = at::impl::VariableHooksInterface;

/// `tensor` as a parameter; none in the runtime's own work, or below an operator.
std::optional<FoundParam> find_any(const TensorBase& tensor) {
  if (!tensor.defined() || !has_residency_key(tensor.unsafeGetTensorImpl()) ||
      c10::impl::tls_is_dispatch_key_excluded(kResidencyKey))
    return std::nullopt;
  return find_param(at::Tensor(tensor));
}
/// The same of what is not the unsharded parameter.
std::optional<FoundParam> find_sharded(const TensorBase& tensor) {
  auto found = find_any(tensor);
  return found && !found->is_unsharded_param ? found : std::nullopt;
}

bool is_unsharded_storage(const TensorBase& tensor) {
  const auto* storage = tensor.defined() ? ParamStorage::of(tensor.unsafeGetTensorImpl()) : nullptr;
  return storage != nullptr && storage->kind() == ParamStorage::Kind::kUnsharded;
}

/// Where LibTorch has them.
template <class Hooks>
std::optional<c10::ScalarType> grad_dtype_in(const Hooks& hooks, const TensorBase& tensor) {
  if constexpr (requires { hooks.grad_dtype(tensor); }) return hooks.grad_dtype(tensor);
  return std::nullopt;
}
template <class Hooks>
void set_grad_dtype_in(const Hooks& hooks, const TensorBase& tensor, const std::optional<c10::ScalarType>& dtype) {
  if constexpr (requires { hooks.set_grad_dtype(tensor, dtype); }) hooks.set_grad_dtype(tensor, dtype);
}

/// What leads to the DTensor leads to the unsharded tensor, whose gradient autograd accumulates. False: there is no DTensor.
bool join_accumulators(const FoundParam& found) {
  namespace autograd_impl = torch::autograd::impl;
  const auto& param = found.param();
  const auto unsharded = param.unsharded_param(), registered = param.sharded_param();
  if (!param.sharded.shared() || !unsharded.defined() || !registered.defined()) return false;
  if (!unsharded.requires_grad()) return true;
  const auto accumulator = autograd_impl::grad_accumulator(unsharded);
  param.sharded.shared()->join_accumulators();
  return true;
}

/// Somebody that is no operator may be about to lead an edge to an entry of parameters(): see Note [Functions of a user's].
void lead_edge_of_entry(const FoundParam& found) {
  const auto& shared = found.param().sharded.shared();
  if (!shared) return;
  if (AsksForDTensor::is_on()) return shared->lead_to_dtensor();
  if (const auto unsharded = found.param().unsharded_param(); unsharded.defined() && unsharded.requires_grad())
    shared->lead_to(torch::autograd::impl::grad_accumulator(unsharded));
  begin_function();
}

bool is_of_kind(const TensorBase& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// An entry of parameters() of which a function asks.
std::optional<FoundParam> find_in_function(const TensorBase& tensor) {
  if (!tensor.defined() || DTensorImpl::of(tensor.unsafeGetTensorImpl()) == nullptr || !is_in_function()) return std::nullopt;
  auto found = find_sharded(tensor);
  return found && found->param().unsharded_param().defined() ? found : std::nullopt;
}

/// What an ordinary tensor can hold of `data`: where that is a sharded parameter, or shows one, the whole's values of now. To
/// share memory with it the tensor would have to be cut.
TensorBase values_for_ordinary(const TensorBase& data) {
  if (!data.defined() || !has_residency_key(data.unsafeGetTensorImpl()) ||
      c10::impl::tls_is_dispatch_key_excluded(kResidencyKey))
    return data;
  const torch::NoGradGuard no_grad;
  const at::Tensor given(data);
  return is_unsharded_storage(data) ? given.clone() : whole_of(given, "set_data").detach();
}

SetDataOfKind set_data_of_kind = nullptr;

/// Autograd is about to record this leaf, perhaps without having asked whether it needs a gradient, as another operand did.
void follow_requires_grad(const TensorBase& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!see_requires_grad(*impl)) [[likely]]
    return;
  const auto* storage = ParamStorage::of(impl);
  if (storage != nullptr && storage->owner() != nullptr) storage->owner()->take_over_requires_grad(storage->index());
}

/// The unsharded parameter's values, as an operator reads them, if tensors beside it show its memory: older `data()`, views. A
/// collective call then, unless they are here. Undefined: there are none, or a backward is under way.
at::Tensor values_for_aliases(const FoundParam& found) {
  const auto unsharded = found.param().unsharded_param();
  if (!unsharded.defined() || torch::autograd::get_current_graph_task_id() != -1) return {};
  if (unsharded.unsafeGetTensorImpl()->unsafe_storage().use_count() == 1) return {};
  const auto values = at::empty_strided(unsharded.sizes(), unsharded.strides(), unsharded.options().requires_grad(false));
  return values.copy_(unsharded);
}

/// set_data: whoever shows the parameter keeps the values of now, as if LibTorch had given it another storage.
void leave_to_aliases(const FoundParam& found) {
  auto& group = *found.group;
  if (!found.param().sharded.shared() || group.parts().config.device.is_meta()) return;
  auto& port = GroupPort::of(group);
  if (port.root()->step().is_pinned()) return;
  const auto whole = values_for_aliases(found);
  const WithoutHostLock may_wait;
  std::lock_guard lock(port.root()->mutex());
  auto& param = found.param();
  param.sharded.leave_to_aliases(param.spec, group.parts().shard.piece(found.index), param.unsharded_param());
  if (whole.defined()) param.unsharded.leave_to_aliases(whole, param.spec, port.shared_from_this(), param.sharded.place());
}

/// Where a forward waits for a backward that may never come, the next one begins no step, which would look for it.
void take_over_grad_dtype(const FoundParam& found) {
  auto& group = *found.group;
  auto& port = GroupPort::of(group);
  if (port.is_between_steps()) return;
  const WithoutHostLock may_wait;
  const std::lock_guard lock(port.root()->mutex());
  if (is_forward(port.root()->step().state()) && !group.parts().local_shards) group.changes().sync_grad_dtypes();
}

/// set_data of a parameter that shares its memory of before fully_shard with another one, on one rank: as in LibTorch that one
/// keeps its values.
void part_from_others(const FoundParam& found) {
  auto& group = *found.group;
  if (!is_kept_by_another(group.parts().shard.piece(found.index))) return;
  const WithoutHostLock may_wait;
  edit(group, {.parting = {found.index}});
}

class Hooks final : public Interface {
 public:
  explicit Hooks(const Interface& next) : next_(next) {}

  /// What replaces a parameter's tensor is a write to the sharded one, from now on and not from the next step on.
  void set_data(const TensorBase& tensor, const TensorBase& data) const override {
    const auto found = find_any(tensor);
    const bool may_be_shown = is_of_kind(tensor) || (found && found->is_unsharded_param);
    if (may_be_shown && set_data_of_kind != nullptr && set_data_of_kind(at::Tensor(tensor), at::Tensor(data))) return;
    if (!found) {
      const bool is_ordinary = tensor.defined() && !has_residency_key(tensor.unsafeGetTensorImpl());
      return next_.set_data(tensor, is_ordinary ? values_for_ordinary(data) : data);
    }
    const auto target = found->is_unsharded_param ? TensorBase(found->param().sharded_param()) : tensor;
    // LibTorch's Module::to() sets what a conversion returned: where there was nothing to convert, the unsharded parameter.
    if (!target.defined() || data.is_same(target) || data.is_same(found->param().unsharded_param())) return;
    const torch::NoGradGuard no_grad;
    part_from_others(*found);
    leave_to_aliases(*found);
    const c10::Storage before = found->param().local_tensor().storage();
    next_.set_data(target, is_unsharded_storage(data) ? TensorBase(at::Tensor(data).clone()) : data);
    if (before.unsafeGetStorageImpl() != found->param().local_tensor().storage().unsafeGetStorageImpl())
      ShardStorage::leave_to_aliases(before);
    auto& port = GroupPort::of(*found->group);
    const WithoutHostLock may_wait;
    std::lock_guard lock(port.root()->mutex());
    // Looked at when that ends.
    if (found->group->parts().config.device.is_meta() || port.root()->step().is_pinned()) return;
    found->group->changes().validate();
    port.root()->runner().ready().drop(*found->group);  // the next touch is to see it
  }

  /// Of a leaf only autograd asks that, and that for where a gradient is to be led to, or to save it for backward.
  int64_t output_nr(const TensorBase& tensor) const override {
    const auto found = next_.grad_fn(tensor) ? std::nullopt : find_any(tensor);
    if (is_of_kind(tensor))
      if (const auto stand_in = stand_in_of(at::Tensor(tensor))) lead_edge_to_leaf(at::Tensor(tensor), *stand_in);
    const bool is_joined = found && join_accumulators(*found);
    if (found) expect_no_function();
    if (is_joined && found->param().requires_grad())
      install_capture_hook(found->param().unsharded_param(),
                           std::static_pointer_cast<GroupPort>(GroupPort::of(*found->group).shared_from_this()), found->index);
    if (found && !found->is_unsharded_param && !is_joined)
      throw UsageError(fmt::format(
          "{}: torch::autograd::grad, backward({{...}}, inputs) or save_for_backward was given a sharded parameter, but "
          "autograd computes the gradient of the unsharded one. Use fsdp::unsharded(parameter) for this rank's gradient of the "
          "whole parameter, not reduced; or loss.backward(), which reduces it, and parameter.grad()",
          found->param().name()));
    return next_.output_nr(tensor);
  }

  /// Before autograd leads a gradient to a leaf it asks whether it is one.
  decltype(std::declval<const Interface&>().grad_fn(std::declval<const TensorBase&>())) grad_fn(
      const TensorBase& tensor) const override {
    if (tensor.defined() && has_residency_key(tensor.unsafeGetTensorImpl())) {
      follow_requires_grad(tensor);
      if (DTensorImpl::of(tensor.unsafeGetTensorImpl()) != nullptr) [[unlikely]]
        if (const auto found = find_sharded(tensor)) lead_edge_of_entry(*found);
    }
    const auto& function = next_.grad_fn(tensor);
    // It is a leaf, then: see Note [Gradients of stand-ins].
    if (!function && is_of_kind(tensor)) [[unlikely]]
      if (const auto stand_in = stand_in_of(at::Tensor(tensor))) lead_edge_to_fork(at::Tensor(tensor), *stand_in);
    return function;
  }

  TensorBase tensor_data(const TensorBase& tensor) const override { return next_.tensor_data(tensor); }
  TensorBase variable_data(const TensorBase& tensor) const override {
    if (const auto found = find_in_function(tensor)) return next_.variable_data(found->param().unsharded_param());
    auto data = next_.variable_data(tensor);
    watch_writes_to_data(at::Tensor(tensor), at::Tensor(data));
    return data;
  }
  unsigned _register_hook(const TensorBase& tensor, std::function<TensorBase(const TensorBase&)> hook) const override {
    const c10::impl::ExcludeDispatchKeyGuard below(kResidencyKey);  // it asks for output_nr, too
    return next_._register_hook(tensor, std::move(hook));
  }
  void remove_hook(const TensorBase& tensor, unsigned position) const override { next_.remove_hook(tensor, position); }
  bool is_view(const TensorBase& tensor) const override { return next_.is_view(tensor); }
  const TensorBase& base(const TensorBase& tensor) const override { return next_.base(tensor); }
  const std::string& name(const TensorBase& tensor) const override { return next_.name(tensor); }
  bool is_leaf(const TensorBase& tensor) const override { return next_.is_leaf(tensor); }
  TensorBase data(const TensorBase& tensor) const override { return next_.data(tensor); }
  int64_t _version(const TensorBase& tensor) const override { return next_._version(tensor); }
  void retain_grad(const TensorBase& tensor) const override { next_.retain_grad(tensor); }
  bool retains_grad(const TensorBase& tensor) const override { return next_.retains_grad(tensor); }
  void _backward(const at::Tensor& tensor, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    end_functions();
    const JoinedRoots joined(tensor);
    next_._backward(tensor, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const TensorBase& tensor, bool value) const override { next_.requires_grad_(tensor, value); }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    next_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  // No `override`: not every LibTorch has them.
  std::optional<c10::ScalarType> grad_dtype(const TensorBase& tensor) const { return grad_dtype_in(next_, tensor); }
  void set_grad_dtype(const TensorBase& tensor, const std::optional<c10::ScalarType>& dtype) const {
    set_grad_dtype_in(next_, tensor, dtype);
    note_set_by_user(*tensor.unsafeGetTensorImpl());
    if (const auto found = find_any(tensor)) take_over_grad_dtype(*found);
  }

 private:
  const Interface& next_;
};

/// LibTorch's own are there since its libraries were loaded.
[[maybe_unused]] const bool is_in_front = [] {
  static Hooks hooks(*at::impl::GetVariableHooks());
  at::impl::SetVariableHooks(&hooks);
  return true;
}();

}  // namespace

void set_data_of_kind_is_done_by(SetDataOfKind function) { set_data_of_kind = function; }

}  // namespace fsdp
