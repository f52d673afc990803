#include "dtensor/rules/operator_call.hpp"

#include <iterator>

namespace fsdp {

std::string_view OperatorCall::name() const {
  std::string_view name = op_.schema().name();
  if (name.starts_with("aten::")) name.remove_prefix(6);
  return name;
}

torch::jit::Stack OperatorCall::call(Arguments arguments) const {
  torch::jit::Stack stack(std::make_move_iterator(arguments.begin()), std::make_move_iterator(arguments.end()));
  op_.callBoxed(&stack);
  return stack;
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
