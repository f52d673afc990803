#include "dispatch/residency.hpp"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "base/require.hpp"
#include "dispatch/dtensor_call.hpp"
#include "dispatch/dtensor_dispatch.hpp"
#include "dispatch/host_lock.hpp"
#include "dispatch/meta_factory.hpp"
#include "dispatch/operator_traits.hpp"
#include "dispatch/param_owner.hpp"
#include "dispatch/param_storage.hpp"
#include "dispatch/recomputation.hpp"
#include "dispatch/residency_fallback.hpp"
#include "dispatch/shard_copy.hpp"

namespace fsdp {

namespace {

// key_set_ is protected: a derived class may name it.
struct TensorKeys : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl* impl) { return impl->*&TensorKeys::key_set_; }
};

using c10::IValue;
using Owners = c10::SmallVector<ParamOwner*, 2>;

/// One operator's operands, as the fallback finds them on the stack.
class Operands {
 public:
  /// may_cast: false in backward, whose operands are those of forward.
  Operands(const c10::OperatorHandle& op, const OperatorTraits& traits, torch::jit::Stack* stack, bool may_cast)
      : op_(op), traits_(traits), may_cast_(may_cast && traits.writes == 0 && traits.is_differentiable) {
    const size_t count = op.schema().arguments().size();
    arguments_ = stack->data() + (stack->size() - count);
    count_ = count;
  }

  /// Finds keyed operands; puts unsharded parameters in the place of sharded parameters where due (T20).
  void examine() {
    for (size_t i = 0; i < count_; ++i) examine(arguments_[i], i);
  }

  bool touches_all_ready(int64_t task) const {
    for (auto* owner : owners_)
      if (!owner->is_ready(task)) return false;
    return true;
  }
  const Owners& owners() const { return owners_; }
  bool has_stand_ins() const { return has_stand_ins_; }
  void follow_modes(int64_t task) const {
    for (auto* owner : owners_)
      if (owner->follows_mode() && !owner->is_ready(task)) owner->follow_mode();
  }
  bool records_autograd() const {
    if (!at::GradMode::is_enabled() || !traits_.is_differentiable) return false;
    for (size_t i = 0; i < count_; ++i)
      if (needs_gradient(arguments_[i])) return true;
    return false;
  }
  const std::string& first_param_name() const { return owners_[0]->param_name(first_index_); }
  /// T8: the other floating-point operands come in the dtype of the first unsharded parameter that wants it so.
  /// Recorded by autograd like a cast that the user wrote.
  void cast_operands() {
    if (cast_like_ == nullptr) return;
    // Asked only now: the unsharded parameter may have got another dtype with this use.
    cast_to_ = c10::typeMetaToScalarType(cast_like_->dtype());
    output_dtype_ = cast_owner_->output_dtype(cast_index_);
    for (size_t i = 0; i < count_; ++i)
      if (!(traits_.statistics >> std::min<size_t>(i, 63) & 1)) cast(arguments_[i]);
  }
  /// What the operator has left on the stack, in the dtype that the parameter's module is to give.
  void cast_results(torch::jit::Stack* stack) const {
    if (!output_dtype_) return;
    const size_t results = op_.schema().returns().size();
    for (size_t i = stack->size() - results; i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (value.isTensor() && is_floating(value.toTensor()))
        value = value.toTensor().to(*output_dtype_);
    }
  }

  /// The result of a `clone`, if that of a part of a parameter.
  void mark_copy(torch::jit::Stack* stack) const {
    if (cloned_ != nullptr) mark_shard_copy(stack->back().toTensor(), *cloned_);
  }

  void carry_writes() {
    for (auto& written : written_) {
      auto* storage = static_cast<ParamStorage*>(written.get());
      if (storage->owner() == nullptr) continue;
      if (storage->kind() == ParamStorage::Kind::kUnsharded)
        storage->owner()->carry_write(storage->index());
      else
        storage->owner()->note_write(storage->index());
    }
  }

 private:
  void examine(IValue& value, size_t argument) {
    if (value.isTensor()) {
      auto* impl = value.unsafeToTensorImpl();
      if (has_residency_key(impl)) examine_tensor(value, impl, argument);
    } else if (value.isList()) {
      examine_list(value, argument);
    } else if (value.isTuple()) {
      for (const auto& element : value.toTupleRef().elements()) examine_constant(element, argument);
    } else if (value.isGenericDict()) {
      for (const auto& entry : value.toGenericDict()) examine_constant(entry.value(), argument);
    }
  }

  void examine_constant(const IValue& element, size_t argument) {
    IValue copy = element;
    examine(copy, argument);
  }

  void examine_list(IValue& value, size_t argument) {
    const auto elements = value.toListRef();
    bool substituted = false;
    c10::SmallVector<IValue, 8> replaced;
    for (size_t i = 0; i < elements.size(); ++i) {
      IValue element = elements[i];
      if (!element.isTensor() && !element.isList()) continue;
      examine(element, argument);
      if (element.isTensor() && element.unsafeToTensorImpl() != elements[i].unsafeToTensorImpl()) {
        if (!substituted) replaced.assign(elements.begin(), elements.end());
        substituted = true;
        replaced[i] = element;
      }
    }
    if (!substituted) return;
    // The list may be the caller's own: change a copy.
    auto list = value.toList().copy();
    for (size_t i = 0; i < replaced.size(); ++i) list.set(i, replaced[i]);
    value = std::move(list);
  }

  void examine_tensor(IValue& value, const c10::TensorImpl* impl, size_t argument) {
    auto* storage = ParamStorage::of(impl);
    if (storage == nullptr) {
      if (stand_in_of(value.toTensor())) has_stand_ins_ = true;
      if (traits_.is_differentiable) refuse_moved_copy(value.toTensor());
      return;
    }
    if (storage->owner() == nullptr) return;  // outlived its group
    auto* owner = storage->owner();
    if (owner->is_between_steps() && traits_.is_differentiable && at::GradMode::is_enabled())
      owner->take_over_requires_grad(storage->index());
    const bool is_written = traits_.writes >> std::min<size_t>(argument, 63) & 1;
    if (storage->kind() == ParamStorage::Kind::kSharded) {
      const bool is_sharded_param = impl == owner->sharded_param(storage->index());
      auto unsharded_param = is_sharded_param && stands_for_unsharded(*owner) ? owner->unsharded_param(storage->index())
                                                               : at::Tensor();
      if (!unsharded_param.defined()) {
        if (is_written) note_write(storage);
        if (traits_.is_clone && is_sharded_param && owner->is_cut())
          cloned_ = &owner->param_name(storage->index());
        return;
      }
      storage = ParamStorage::of(unsharded_param.unsafeGetTensorImpl());
      value = std::move(unsharded_param);
      if (storage == nullptr) return;
    }
    if (owners_.empty()) first_index_ = storage->index();
    if (cast_like_ == nullptr && may_cast_ && owner->casts_operands() && is_floating(value.toTensor()))
      set_cast(*owner, *storage, value.unsafeToTensorImpl());
    if (std::find(owners_.begin(), owners_.end(), owner) == owners_.end()) owners_.push_back(owner);
    if (is_written) {
      check_write(*storage, value);
      note_write(storage);
    }
  }

  bool stands_for_unsharded(const ParamOwner& owner) {
    return traits_.is_differentiable && (owner.is_in_scope() || records_autograd());
  }

  void check_write(const ParamStorage& storage, const IValue& value) const {
    if (!traits_.changes_metadata) return;
    const auto unsharded_param = storage.owner()->unsharded_param(storage.index());
    const auto& name = op_.schema().name();
    const bool is_unsharded_param = unsharded_param.defined() && unsharded_param.unsafeGetTensorImpl() == value.unsafeToTensorImpl();
    // A detached copy's own sizes may change; the unsharded parameter's may not, nor may anybody's storage.
    require(!is_unsharded_param && name != "aten::set_" && name != "aten::resize_",
            "{}: {} would change the shape or storage of this sharded parameter; change it before "
            "fully_shard, or write values with copy_",
            storage.owner()->param_name(storage.index()), name);
  }

  void set_cast(const ParamOwner& owner, const ParamStorage& storage, const c10::TensorImpl* like) {
    cast_like_ = like;
    cast_owner_ = &owner;
    cast_index_ = storage.index();
  }

  static bool is_floating(const at::Tensor& tensor) {
    return tensor.defined() && at::isFloatingType(tensor.scalar_type());
  }

  bool is_cast(const IValue& value) const {
    if (!value.isTensor() || !is_floating(value.toTensor())) return false;
    const auto& tensor = value.toTensor();
    return tensor.scalar_type() != *cast_to_ && !has_residency_key(tensor.unsafeGetTensorImpl()) &&
           !tensor.unsafeGetTensorImpl()->is_wrapped_number();
  }

  void cast(IValue& value) const {
    if (is_cast(value)) {
      value = value.toTensor().to(*cast_to_);
    } else if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      if (std::none_of(tensors.begin(), tensors.end(), [this](const auto& t) { return is_cast(t); }))
        return;
      c10::List<at::Tensor> cast_list;
      for (const auto& tensor : tensors)
        cast_list.push_back(is_cast(tensor) ? tensor.to(*cast_to_) : tensor);
      value = std::move(cast_list);
    }
  }

  void note_write(ParamStorage* storage) {
    written_.push_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }

  static bool needs_gradient(const IValue& value) {
    if (value.isTensor()) {
      const auto* impl = value.unsafeToTensorImpl();
      return impl != c10::UndefinedTensorImpl::singleton() && impl->requires_grad();
    }
    if (!value.isList()) return false;
    for (const auto& element : value.toListRef())
      if (needs_gradient(element)) return true;
    return false;
  }

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  const bool may_cast_;
  IValue* arguments_;
  size_t count_;
  Owners owners_;
  size_t first_index_ = 0;
  bool has_stand_ins_ = false;
  const std::string* cloned_ = nullptr;  // the parameter whose part is cloned
  const c10::TensorImpl* cast_like_ = nullptr;  // whose dtype the others get; on the stack
  const ParamOwner* cast_owner_ = nullptr;
  size_t cast_index_ = 0;
  std::optional<at::ScalarType> cast_to_, output_dtype_;
  c10::SmallVector<c10::intrusive_ptr<c10::StorageImpl>, 1> written_;
};

template <c10::DispatchKey key>
void fall_back(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& traits = traits_of(op);
  const bool reads_data = !traits.is_view && !traits.is_transparent;
  const int64_t task = torch::autograd::get_current_graph_task_id();
  Operands operands(op, traits, stack, /*may_cast=*/reads_data && runs_forward(task));
  operands.examine();
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
  if (operands.has_stand_ins()) return call_with_stand_ins(op, below, stack);
  if (operands.owners().empty()) place_on_meta(op, stack);
  operands.follow_modes(task);
  if (reads_data && !operands.owners().empty()) {
    if (!operands.touches_all_ready(task)) {
      const auto& owners = operands.owners();
      const WithoutHostLock may_wait;
      owners[0]->make_resident({owners.data(), owners.size()},
                               {.records_autograd = operands.records_autograd(),
                                .param_name = operands.first_param_name()});
    }
  }
  operands.cast_operands();
  if (traits.is_aten && !traits.is_transparent) {
    c10::impl::ExcludeDispatchKeyGuard guard(key);
    op.redispatchBoxed(below, stack);
  } else {
    // Unknown code below may touch other groups, or this one later: keep watching.
    op.redispatchBoxed(below, stack);
  }
  operands.cast_results(stack);
  operands.mark_copy(stack);
  operands.carry_writes();
}

}  // namespace

void residency_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  fall_back<kResidencyKey>(op, keys, stack);
}

void inner_residency_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  fall_back<kInnerResidencyKey>(op, keys, stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&residency_fallback>());
}

namespace {

/// An operator made of others for every backend would take this key for a backend without a kernel, and LayerNorm,
/// say, would be computed in another way than without it: such operators get the fallback by name.
void make_inner_fallback_known() {
  static const bool is_known = [] {
    static torch::Library all(torch::Library::IMPL, "_", kInnerResidencyKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&inner_residency_fallback>());
    static torch::Library aten(torch::Library::IMPL, "aten", kInnerResidencyKey, __FILE__, __LINE__);
    for (const auto key : {c10::DispatchKey::CompositeExplicitAutograd,
                           c10::DispatchKey::CompositeExplicitAutogradNonFunctional})
      for (const auto& name : c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(key)) {
        if (name.getNamespace() != "aten") continue;
        const auto op = c10::Dispatcher::singleton().findSchema(name);
        if (!op || op->hasKernelForDispatchKey(kInnerResidencyKey)) continue;
        aten.impl((name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&inner_residency_fallback>());
      }
    return true;
  }();
  static_cast<void>(is_known);
}

}  // namespace

void add_inner_residency_key(const at::Tensor& alias) {
  make_inner_fallback_known();
  auto& keys = TensorKeys::of(alias.unsafeGetTensorImpl());
  keys = keys.add(kInnerResidencyKey);
}

void add_residency_key(const at::Tensor& tensor) {
  auto& keys = TensorKeys::of(tensor.unsafeGetTensorImpl());
  keys = keys.add(kResidencyKey);
}

void remove_residency_key(const at::Tensor& tensor) {
  auto& keys = TensorKeys::of(tensor.unsafeGetTensorImpl());
  keys = keys.remove(kResidencyKey);
}

}  // namespace fsdp
