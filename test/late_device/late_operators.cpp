// All other operators: shapes from the meta device at once, values from the CPU's kernel on the current stream.
#include "late_operators.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <functional>
#include <stdexcept>

#include "late_streams.hpp"

namespace fsdp::test {
namespace {

using c10::IValue;
using torch::jit::Stack;

at::Tensor meta_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

bool is_number(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

/// A number of the host's stays one, as on any device.
at::Tensor for_shapes(const at::Tensor& tensor) { return is_number(tensor) ? tensor : meta_like(tensor); }

/// What the host has is set aside, as it may change before the stream comes to it.
at::Tensor for_values(const at::Tensor& tensor) {
  if (is_late(tensor.device())) return host_view(tensor);
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

/// With every tensor in it, and every device, replaced.
class Replace {
 public:
  Replace(at::Tensor (*tensor)(const at::Tensor&), c10::Device device) : tensor_(tensor), device_(device) {}

  IValue operator()(const IValue& value) const {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(tensor_(value.toTensor())) : value;
    if (value.isDevice()) return device_;
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? tensor_(tensor) : tensor);
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor && tensor->defined() ? std::optional(tensor_(*tensor)) : tensor);
      return list;
    }
    return value;
  }

 private:
  at::Tensor (*tensor_)(const at::Tensor&);
  c10::Device device_;
};

/// One operator's call.
class LateCall {
 public:
  LateCall(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {
    const size_t count = op.schema().arguments().size();
    arguments_.assign(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    for (const IValue& argument : arguments_) look_for_device(argument);
    if (!device_) throw std::logic_error("late device: " + name() + " has no tensor there");
  }

  void run() {
    const c10::DeviceGuard device(*device_);
    const at::AutoDispatchBelowADInplaceOrView below;
    refuse_views();
    for (const IValue& argument : arguments_) refuse_host_tensors(argument);
    std::optional<Stack> shapes;
    if (returns_tensors()) shapes = find_shapes();
    if (shapes)
      run_later(*shapes);
    else
      run_now();
  }

 private:
  std::string name() const { return op_.schema().name() + "." + op_.schema().overload_name(); }

  void look_for_device(const IValue& value) {
    if (device_) return;
    if (value.isTensor()) {
      if (value.toTensor().defined() && is_late(value.toTensor().device())) device_ = value.toTensor().device();
    } else if (value.isList()) {
      for (const IValue& element : value.toListRef()) look_for_device(element);
    }
  }

  bool returns_tensors() const {
    for (const auto& result : op_.schema().returns()) {
      const auto& type = *result.type();
      if (type.kind() != c10::TypeKind::TensorType &&
          !(type.kind() == c10::TypeKind::ListType &&
            type.containedType(0)->kind() == c10::TypeKind::TensorType))
        return false;
    }
    return true;
  }

  /// As on a GPU, but for numbers, and for indices.
  void refuse_host_tensors(const IValue& value) const {
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) refuse_host_tensors(tensor);
    if (!value.isTensor() || !value.toTensor().defined()) return;
    const auto& tensor = value.toTensor();
    TORCH_CHECK(!tensor.is_cpu() || is_number(tensor), "Expected all tensors to be on the same device, but ", name(),
                " found at least two devices, ", *device_, " and cpu!");
  }

  /// A kernel of this kind that is not written would copy what should be shared.
  void refuse_views() const {
    for (const auto& result : op_.schema().returns())
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite())
        throw std::logic_error("late device: " + name() + " makes a view, and is not written");
  }

  bool is_out(size_t argument) const {
    return op_.schema().arguments()[argument].is_out() && arguments_[argument].isTensor();
  }

  /// Kernels may use `out` for other shapes on the way: they get one that is nobody's.
  Stack replaced(const Replace& replace, c10::Device device) const {
    Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i)
      stack.push_back(is_out(i) ? at::empty({0}, arguments_[i].toTensor().options().device(device).pinned_memory(false))
                                : replace(arguments_[i]));
    return stack;
  }

  /// None: they depend on values, or LibTorch has no kernel that tells them.
  std::optional<Stack> find_shapes() {
    auto shapes = replaced(Replace(for_shapes, at::kMeta), at::kMeta);
    const auto given = shapes;
    try {
      op_.callBoxed(&shapes);
    } catch (const c10::NotImplementedError&) {
      return {};
    }
    for (size_t i = 0; i < given.size(); ++i)
      if (is_out(i) && arguments_[i].toTensor().sizes() != given[i].toTensor().sizes())
        resize_late(arguments_[i].toTensor(), given[i].toTensor().sizes());
    return shapes;
  }

  /// The argument that the result is; null: a tensor of its own.
  const IValue* written_argument(size_t result) const {
    const auto* alias = op_.schema().returns()[result].alias_info();
    if (alias == nullptr) return nullptr;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* other = op_.schema().arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return &arguments_[i];
    }
    throw std::logic_error("late device: " + name() + " returns an argument that is not found");
  }

  at::Tensor made_like(const at::Tensor& shape) const {
    return shape.defined() ? at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(*device_))
                           : shape;
  }

  void run_later(const Stack& shapes) {
    const size_t count = op_.schema().returns().size();
    Stack results;
    std::vector<std::pair<at::Tensor, at::Tensor>> to_copy_out;  // what the stream writes, and where that goes
    std::vector<std::vector<at::Tensor>> to_fill(count);         // the results, as the stream sees them
    const auto make = [&](const at::Tensor& shape, size_t result) {
      auto made = made_like(shape);
      to_fill[result].push_back(made.defined() ? host_view(made) : made);
      return made;
    };
    for (size_t i = 0; i < count; ++i) {
      if (const auto* argument = written_argument(i)) {
        results.push_back(*argument);
      } else if (shapes[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& shape : shapes[i].toTensorVector()) list.push_back(make(shape, i));
        results.push_back(std::move(list));
      } else {
        results.push_back(make(shapes[i].toTensor(), i));
      }
    }
    auto values = replaced(Replace(for_values, at::kCPU), at::kCPU);
    for (size_t i = 0; i < values.size(); ++i)
      if (is_out(i)) to_copy_out.emplace_back(values[i].toTensor(), host_view(arguments_[i].toTensor()));
    // A graph runs it again and again.
    enqueue_late(device_->index(), name(),
                 [op = op_, values = std::move(values), to_copy_out = std::move(to_copy_out),
                  to_fill = std::move(to_fill)] {
                   const at::AutoDispatchBelowADInplaceOrView below;
                   auto stack = values;
                   op.callBoxed(&stack);
                   for (const auto& [from, to] : to_copy_out) to.copy_(from);
                   for (size_t i = 0; i < to_fill.size(); ++i) fill(to_fill[i], stack[i]);
                 });
    give(std::move(results));
  }

  static void fill(const std::vector<at::Tensor>& to, const IValue& value) {
    if (to.empty()) return;
    const auto from = value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector();
    for (size_t i = 0; i < to.size(); ++i)
      if (to[i].defined()) to[i].copy_(from[i]);
  }

  /// For what the host has to know.
  void run_now() {
    wait_for_late(device_->index());
    auto values = replaced(Replace(for_values, at::kCPU), at::kCPU);
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (is_out(i)) throw std::logic_error("late device: " + name() + " has no shapes without values");
    op_.callBoxed(&values);
    for (size_t i = 0; i < values.size(); ++i) {
      if (const auto* argument = written_argument(i))
        values[i] = *argument;
      else if (values[i].isTensor() && values[i].toTensor().defined())
        values[i] = values[i].toTensor().to(*device_, /*non_blocking=*/true);
    }
    give(std::move(values));
  }

  void give(Stack results) {
    torch::jit::drop(*stack_, arguments_.size());
    for (IValue& result : results) stack_->push_back(std::move(result));
  }

  const c10::OperatorHandle op_;
  Stack* const stack_;
  Stack arguments_;
  std::optional<c10::Device> device_;
};

void fall_back_to_host(const c10::OperatorHandle& op, Stack* stack) { LateCall(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back_to_host>());
}

}  // namespace
}  // namespace fsdp::test
