#include "dispatch/operand_scan.hpp"

#include "base/require.hpp"
#include "dispatch/stand_in/stand_in.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "dtensor/function_scope.hpp"
#include "dtensor/rules/operator_call.hpp"

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
  return at::GradMode::is_enabled() && info_.stands_for_unsharded && std::ranges::any_of(arguments_, needs_gradient);
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

namespace {

/// `detach()` or `data()` of a parameter, which a function is given.
bool is_alias_in_function(const DTensorImpl& dtensor, const ParamOwner& owner, size_t index) {
  if (!owner.is_in_scope() || !is_in_function()) return false;
  const auto registered = owner.sharded_param(index);
  const auto* param = registered.defined() ? DTensorImpl::of(registered) : nullptr;
  return param != nullptr && dtensor.local().is_same(param->local()) && !dtensor.requires_grad();
}

/// Whose parameter a DTensor is, as modules hold it; null for any other.
std::pair<ParamOwner*, size_t> registered(const DTensorImpl& dtensor) {
  const auto* storage = dtensor.local().defined() ? ParamStorage::of(dtensor.local().unsafeGetTensorImpl()) : nullptr;
  auto* owner = storage != nullptr ? storage->owner() : nullptr;
  if (owner == nullptr) return {nullptr, 0};
  const bool is_it =
      owner->sharded_identity(storage->index()) == &dtensor || is_alias_in_function(dtensor, *owner, storage->index());
  return is_it ? std::pair(owner, storage->index()) : std::pair(static_cast<ParamOwner*>(nullptr), size_t{0});
}

}  // namespace

/// What autograd is to record in the place of a DTensor that is a parameter; undefined: the DTensor itself is meant.
at::Tensor OperandScan::unsharded_in_place_of(ParamOwner& owner, size_t index) const {
  if (owner.may_have_toggled() && info_.stands_for_unsharded && at::GradMode::is_enabled())
    owner.take_over_requires_grad(index);
  return stands_for_unsharded(owner) ? owner.recorded_param(index) : at::Tensor();
}

void OperandScan::examine_dtensor(IValue& value, const DTensorImpl& dtensor, size_t argument) {
  const auto [owner, index] = registered(dtensor);
  auto unsharded_param = owner != nullptr ? unsharded_in_place_of(*owner, index) : at::Tensor();
  has_dtensors_ |= !unsharded_param.defined();
  if (!unsharded_param.defined()) return;
  if (is_written(argument) && !unsharded_param.is_same(owner->unsharded_param(index))) refuse_write(*owner, index);
  value = std::move(unsharded_param);
  if (has_residency_key(value.unsafeToTensorImpl())) examine_tensor(value, value.unsafeToTensorImpl(), argument);
}

void OperandScan::examine_tensor(IValue& value, const c10::TensorImpl* impl, size_t argument) {
  auto* storage = ParamStorage::of(impl);
  if (storage == nullptr) {
    if (const auto* dtensor = DTensorImpl::of(impl)) return examine_dtensor(value, *dtensor, argument);
    if (become_ordinary(value.toTensor())) return;
    if (stand_in_of(value.toTensor())) has_stand_ins_ = true;
    return;
  }
  if (storage->owner() == nullptr) return;  // outlived its group
  auto* owner = storage->owner();
  if (owner->may_have_toggled() && info_.stands_for_unsharded && at::GradMode::is_enabled())
    owner->take_over_requires_grad(storage->index());
  if (storage->kind() == ParamStorage::Kind::kSharded) {
    const bool is_sharded_param = impl == owner->sharded_identity(storage->index());
    auto unsharded_param = is_sharded_param && stands_for_unsharded(*owner) ? owner->unsharded_param(storage->index())
                                                                            : at::Tensor();
    if (!unsharded_param.defined()) {
      if (is_written(argument)) note_write(storage);
      return;
    }
    storage = ParamStorage::of(unsharded_param.unsafeGetTensorImpl());
    value = std::move(unsharded_param);
    if (storage == nullptr) return;
  }
  if (owners_.empty()) first_index_ = storage->index();
  if (may_cast_ && owner->casts_operands()) cast_.offer(*owner, storage->index(), value.toTensor());
  if (std::find(owners_.begin(), owners_.end(), owner) == owners_.end()) owners_.push_back(owner);
  if (is_written(argument)) {
    check_write(*storage, value);
    note_write(storage);
  }
}

bool OperandScan::stands_for_unsharded(const ParamOwner& owner) const {
  if (info_.stands_for_unsharded) return owner.is_in_scope() || records_autograd();
  return owner.is_in_scope() && is_in_function();
}

/// Of a tensor-parallel parameter, which has no memory of the whole's sizes.
void OperandScan::refuse_write(const ParamOwner& owner, size_t index) const {
  TORCH_CHECK(!records_autograd(), "a leaf Variable that requires grad is being used in an in-place operation.");
  throw UsageError(fmt::format(
      "{}: {} would write to this tensor-parallel parameter in forward, where it stands for its unsharded parameter; write to "
      "that, which the module's member holds, or behind forward",
      owner.param_name(index), op_.schema().name()));
}

void OperandScan::check_write(const ParamStorage& storage, const IValue& value) const {
  if (!info_.changes_metadata) return;
  const auto unsharded_param = storage.owner()->unsharded_param(storage.index());
  const auto& name = op_.schema().name();
  const bool is_unsharded_param =
      unsharded_param.defined() && unsharded_param.unsafeGetTensorImpl() == value.unsafeToTensorImpl();
  // A detached copy's own sizes may change; the unsharded parameter's may not, nor may anybody's storage.
  require(!is_unsharded_param && name != "aten::set_" && name != "aten::resize_",
          "{}: {} would change the shape or storage of this sharded parameter; change it before "
          "fully_shard, or write values with copy_",
          storage.owner()->param_name(storage.index()), name);
}

bool OperandScan::means_pieces(int64_t task) const {
  if (owners_.empty() || task != -1 || at::GradMode::is_enabled()) return false;
  const auto family = info_.family;
  const bool writes = !written_.empty() && (family == Family::kPointwise || family == Family::kDraw);
  if ((family != Family::kLike && !writes) || is_in_function()) return false;
  return std::ranges::all_of(owners_, [&](const auto* owner) {
    return owner->is_between_steps() && !(writes && owner->is_in_scope());
  });
}

namespace {

/// `data()` of a parameter is another tensor with the same elements.
bool shows_all(const at::Tensor& tensor, const at::Tensor& unsharded_param) {
  return unsharded_param.defined() && tensor.sizes() == unsharded_param.sizes() &&
         tensor.strides() == unsharded_param.strides() && tensor.storage_offset() == unsharded_param.storage_offset() &&
         tensor.scalar_type() == unsharded_param.scalar_type();
}

/// Of the parameter what `alias` is of its unsharded parameter: needs no gradient, and counts writes where that one does.
at::Tensor alias_like(const at::Tensor& dtensor, const at::Tensor& alias) {
  auto version = alias.unsafeGetTensorImpl()->version_counter();
  return at::Tensor(
      dtensor.unsafeGetTensorImpl()->shallow_copy_and_detach(std::move(version), /*allow_tensor_metadata_change=*/true));
}

}  // namespace

OperandScan::Replaced OperandScan::use_dtensors() {
  Replaced replaced;
  if (owners_.empty() || records_autograd()) return replaced;
  for (auto& value : arguments_)
    replace_tensors(value, [&](const at::Tensor& tensor, int64_t) {
      const auto* storage =
          has_residency_key(tensor.unsafeGetTensorImpl()) ? ParamStorage::of(tensor.unsafeGetTensorImpl()) : nullptr;
      if (storage == nullptr || storage->kind() != ParamStorage::Kind::kUnsharded) return at::Tensor();
      auto& owner = *storage->owner();
      const auto dtensor = owner.sharded_param(storage->index());
      const auto unsharded_param = owner.unsharded_param(storage->index());
      const bool stands_for_it = dtensor.defined() && DTensorImpl::of(dtensor) != nullptr &&
                                 dtensor.sizes() == tensor.sizes() && shows_all(tensor, unsharded_param);
      replaced.leaves_unsharded |= !stands_for_it;
      if (!stands_for_it) return at::Tensor();
      replaced.pairs.emplace_back(tensor.is_same(unsharded_param) ? dtensor : alias_like(dtensor, tensor), tensor);
      has_dtensors_ = true;
      return replaced.pairs.back().first;
    });
  return replaced;
}

void OperandScan::restore(const Replaced& replaced, torch::jit::Stack* stack) const {
  const size_t count = op_.schema().returns().size();
  for (size_t i = 0; i < count; ++i)
    replace_tensors((*stack)[stack->size() - count + i], [&](const at::Tensor& result, int64_t) {
      for (const auto& [dtensor, tensor] : replaced.pairs)
        if (dtensor.is_same(result)) return tensor;
      return at::Tensor();
    });
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
