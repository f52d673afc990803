#include "dispatch/operand_cast.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "dispatch/residency.hpp"

namespace fsdp {
namespace {

bool is_floating(const at::Tensor& tensor) { return tensor.defined() && at::isFloatingType(tensor.scalar_type()); }

}  // namespace

at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype) {
  return is_floating(tensor) ? tensor.to(dtype) : tensor;
}

void OperandCast::offer(const ParamOwner& owner, size_t index, const at::Tensor& like) {
  if (to_ || !is_floating(like)) return;
  to_ = like.scalar_type();
  like_ = like.unsafeGetTensorImpl();
  owner_ = &owner;
  index_ = index;
}

void OperandCast::cast_operands(std::span<c10::IValue> arguments, uint64_t statistics) {
  if (!to_) return;
  if (like_ != nullptr) {
    // Asked again: the unsharded parameter may have got another dtype with this use.
    to_ = c10::typeMetaToScalarType(like_->dtype());
    output_dtype_ = owner_->output_dtype(index_);
  }
  for (size_t i = 0; i < arguments.size(); ++i)
    if (!(statistics >> std::min<size_t>(i, 63) & 1)) cast(arguments[i]);
}

void OperandCast::cast_results(torch::jit::Stack* stack, size_t results) const {
  if (!output_dtype_) return;
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor() && is_floating(value.toTensor())) value = value.toTensor().to(*output_dtype_);
  }
}

bool OperandCast::is_due(const c10::IValue& value) const {
  if (!value.isTensor() || !is_floating(value.toTensor())) return false;
  const auto* impl = value.unsafeToTensorImpl();
  const bool stays = like_ != nullptr && has_residency_key(impl);
  return c10::typeMetaToScalarType(impl->dtype()) != *to_ && !stays && !impl->is_wrapped_number();
}

void OperandCast::cast(c10::IValue& value) const {
  if (is_due(value)) {
    value = value.toTensor().to(*to_);
  } else if (value.isTensorList()) {
    const auto tensors = value.toTensorVector();
    if (std::ranges::none_of(tensors, [this](const auto& tensor) { return is_due(tensor); })) return;
    c10::List<at::Tensor> cast_list;
    for (const auto& tensor : tensors) cast_list.push_back(is_due(tensor) ? tensor.to(*to_) : tensor);
    value = std::move(cast_list);
  }
}

}  // namespace fsdp
