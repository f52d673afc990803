#include "dispatch/operand_scan.hpp"

#include "base/require.hpp"
#include "dispatch/dtensor_dispatch.hpp"
#include "dispatch/residency.hpp"
#include "dispatch/shard_copy.hpp"
#include "dtensor/dtensor_impl.hpp"

namespace fsdp {

using c10::IValue;

namespace {

bool needs_gradient(const IValue& value) {
  if (value.isTensor()) {
    const auto* impl = value.unsafeToTensorImpl();
    return impl != c10::UndefinedTensorImpl::singleton() && impl->requires_grad();
  }
  if (!value.isList()) return false;
  for (const auto& element : value.toListRef())
    if (needs_gradient(element)) return true;
  return false;
}

}  // namespace

bool OperandScan::records_autograd() const {
  return at::GradMode::is_enabled() && traits_.is_differentiable && std::ranges::any_of(arguments_, needs_gradient);
}

void OperandScan::examine(IValue& value, size_t argument) {
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

void OperandScan::examine_constant(const IValue& element, size_t argument) {
  IValue copy = element;
  examine(copy, argument);
}

void OperandScan::examine_list(IValue& value, size_t argument) {
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

void OperandScan::examine_tensor(IValue& value, const c10::TensorImpl* impl, size_t argument) {
  auto* storage = ParamStorage::of(impl);
  if (storage == nullptr) {
    if (DTensorImpl::of(impl) != nullptr) {
      has_dtensors_ = true;
      return;
    }
    if (become_ordinary(value.toTensor())) return;
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
  if (may_cast_ && owner->casts_operands()) cast_.offer(*owner, storage->index(), value.toTensor());
  if (std::find(owners_.begin(), owners_.end(), owner) == owners_.end()) owners_.push_back(owner);
  if (is_written) {
    check_write(*storage, value);
    note_write(storage);
  }
}

bool OperandScan::stands_for_unsharded(const ParamOwner& owner) const {
  return traits_.is_differentiable && (owner.is_in_scope() || records_autograd());
}

void OperandScan::check_write(const ParamStorage& storage, const IValue& value) const {
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

void OperandScan::mark_copy(torch::jit::Stack* stack) const {
  if (cloned_ != nullptr) mark_shard_copy(stack->back().toTensor(), *cloned_);
}

void OperandScan::carry_writes() {
  for (auto& written : written_) {
    auto* storage = static_cast<ParamStorage*>(written.get());
    if (storage->owner() == nullptr) continue;
    if (storage->kind() == ParamStorage::Kind::kUnsharded)
      storage->owner()->carry_write(storage->index());
    else
      storage->owner()->note_write(storage->index());
  }
}

}  // namespace fsdp
