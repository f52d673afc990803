#include "dispatch/stand_in/deferred_call.hpp"

namespace fsdp {

using c10::IValue;

DeferredCall::DeferredCall(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments)
    : op_(op), arguments_(arguments.begin(), arguments.end()), had_grad_mode_(at::GradMode::is_enabled()) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    auto& value = arguments_[i];
    if (value.isTensor()) {
      if (auto stand_in = stand_in_of(value.toTensor())) {
        operands_.push_back({i, std::nullopt, std::move(stand_in)});
        value = at::Tensor();
      }
    } else if (value.isList()) {
      auto list = value.toList().copy();
      for (size_t j = 0; j < list.size(); ++j) {
        const IValue element = list.get(j);
        if (!element.isTensor()) continue;
        if (auto stand_in = stand_in_of(element.toTensor())) {
          operands_.push_back({i, j, std::move(stand_in)});
          list.set(j, at::Tensor());
        }
      }
      value = std::move(list);
    }
  }
}

torch::jit::Stack DeferredCall::repeat() const {
  // What was made without a history gets none now.
  at::AutoGradMode mode(had_grad_mode_);
  auto stack = arguments_;
  for (auto& value : stack)
    if (value.isList()) value = value.toList().copy();
  for (const auto& operand : operands_) {
    auto ordinary = operand.stand_in->ordinary();
    if (!ordinary.defined()) return {};
    if (operand.element)
      stack[operand.argument].toList().set(*operand.element, std::move(ordinary));
    else
      stack[operand.argument] = std::move(ordinary);
  }
  op_.callBoxed(&stack);
  return stack;
}

int64_t DeferredCall::version() const {
  int64_t sum = 0;
  for (const auto& operand : operands_) sum += operand.stand_in->version();
  return sum;
}

void DeferredCall::note_write() const {
  for (const auto& operand : operands_) operand.stand_in->note_write();
}

void DeferredCall::note_data_write() const {
  for (const auto& operand : operands_) operand.stand_in->note_data_write();
}

bool DeferredCall::is_of_scalar() const {
  return std::any_of(operands_.begin(), operands_.end(),
                     [](const auto& operand) { return operand.stand_in->is_of_scalar(); });
}

bool DeferredCall::casts_operands() const {
  return std::any_of(operands_.begin(), operands_.end(),
                     [](const auto& operand) { return operand.stand_in->casts_operands(); });
}

namespace {

/// One result of a call.
class Result final : public StandIn {
 public:
  Result(std::shared_ptr<DeferredCall> call, size_t index, std::optional<size_t> element)
      : call_(std::move(call)), index_(index), element_(element) {}

  /// A result with memory of its own: what was written to it, or to its operands, since is not repeated.
  void keep_version(const at::Tensor& tensor) {
    own_version_ = tensor.unsafeGetTensorImpl()->version_counter();
    made_at_ = version();
  }

  at::Tensor ordinary() override {
    if (made_at_ && version() != *made_at_) return {};
    const auto results = call_->repeat();
    if (results.empty()) return {};
    const auto& result = results[index_];
    return element_ ? result.toListRef()[*element_].toTensor() : result.toTensor();
  }
  int64_t version() const override {
    return call_->version() + (own_version_.enabled() ? own_version_.current_version() : 0);
  }
  bool is_of_scalar() const override { return call_->is_of_scalar(); }
  void note_write() override {
    if (!made_at_) call_->note_write();  // a view
  }
  void note_data_write() override {
    if (!made_at_) call_->note_data_write();
  }
  bool casts_operands() const override { return call_->casts_operands(); }
  bool is_refusal(const std::exception& error) const override { return call_->is_refusal(error); }

 private:
  std::shared_ptr<DeferredCall> call_;
  size_t index_;
  std::optional<size_t> element_;
  c10::VariableVersion own_version_{c10::VariableVersion::DISABLED};
  std::optional<int64_t> made_at_;
};

}  // namespace

void make_results_stand_in(const std::shared_ptr<DeferredCall>& call, torch::jit::Stack& stack, size_t results,
                           bool is_view) {
  const auto add = [&](const at::Tensor& tensor, size_t index, std::optional<size_t> element) {
    // An operand itself (`to` where nothing changes) stays what it is.
    if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)) return;
    if (stand_in_of(tensor)) return;
    auto result = c10::make_intrusive<Result>(call, index, element);
    if (!is_view) result->keep_version(tensor);
    make_stand_in(tensor, std::move(result));
  };
  for (size_t index = 0; index < results; ++index) {
    const auto& value = stack[stack.size() - results + index];
    if (value.isTensor()) add(value.toTensor(), index, std::nullopt);
    if (!value.isTensorList()) continue;
    const auto elements = value.toListRef();
    for (size_t element = 0; element < elements.size(); ++element) add(elements[element].toTensor(), index, element);
  }
}

}  // namespace fsdp
