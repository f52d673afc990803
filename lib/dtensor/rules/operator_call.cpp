#include "dtensor/rules/operator_call.hpp"

#include <iterator>

#include "tensor/strides.hpp"

namespace fsdp {

std::string_view OperatorCall::name() const {
  std::string_view name = op_.schema().name();
  if (name.starts_with("aten::")) name.remove_prefix(6);
  return name;
}

DTensorSpec::Ptr OperatorCall::in_format(const DTensorSpec::Ptr& spec) const {
  if (info_.arguments.memory_format < 0) return spec;
  const auto& value = operand(static_cast<size_t>(info_.arguments.memory_format));
  if (!value.isInt() || value.toMemoryFormat() == at::MemoryFormat::Preserve) return spec;
  std::vector<int64_t> strides;
  if (value.toMemoryFormat() == at::MemoryFormat::ChannelsLast) strides = c10::get_channels_last_strides_2d(spec->sizes());
  if (value.toMemoryFormat() == at::MemoryFormat::ChannelsLast3d) strides = c10::get_channels_last_strides_3d(spec->sizes());
  if (strides.empty()) strides = row_major_strides(spec->sizes());
  if (spec->is_flat()) return strides == spec->strides() ? spec : nullptr;
  return spec_like(*spec, spec->sizes(), spec->placements(), strides);
}

torch::jit::Stack OperatorCall::call(const Arguments& arguments) const {
  torch::jit::Stack stack = arguments;
  op_.callBoxed(&stack);
  return stack;
}

void OperatorCall::note_writes_of_nothing() const {
  for (size_t i = 0; info_.writes != 0 && i < count_; ++i)
    if (is_written(i))
      for_tensors(operand(i), [](const at::Tensor& tensor, int64_t) {
        const auto* dtensor = DTensorImpl::of(tensor);
        if (dtensor != nullptr && dtensor->has_piece() && dtensor->local().numel() == 0) dtensor->local().zero_();
      });
}

void OperatorCall::give(c10::IValue result) const {
  stack_->resize(stack_->size() - count_);
  stack_->push_back(std::move(result));
}

bool OperatorCall::restore_written(size_t i, c10::IValue& result) const {
  const auto& schema = op_.schema();
  const auto* alias = schema.returns()[i].alias_info();
  if (alias == nullptr || !alias->isWrite()) return false;
  for (size_t k = 0; k < count_; ++k) {
    const auto* known = schema.arguments()[k].alias_info();
    if (known != nullptr && known->isWrite() && known->beforeSets() == alias->beforeSets()) result = operand(k);
  }
  return true;
}

void OperatorCall::finish(torch::jit::Stack results) const {
  stack_->resize(stack_->size() - count_);
  std::move(results.begin(), results.end(), std::back_inserter(*stack_));
}

}  // namespace fsdp
