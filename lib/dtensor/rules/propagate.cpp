#include "dtensor/rules/propagate.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "base/require.hpp"
#include "dtensor/recorded.hpp"

namespace fsdp {

namespace {

/// Scalars that waited are read, and what is 0-dim and the same everywhere is an ordinary tensor to operators that only read
/// it. Returns whether DTensors are left.
bool read_scalars(const OperatorCall& call) {
  bool has_dtensors = false;
  const auto family = call.info().family;
  const bool keeps = family == Family::kAlias || family == Family::kKept || family == Family::kMayTakeData;
  // A view has the storage of what it shows: torch::save writes it once.
  const bool may_replace = !keeps && family != Family::kView && family != Family::kComposite;
  for (size_t i = 0; i < call.count(); ++i)
    replace_tensors(call.operands()[i], [&](const at::Tensor& tensor, int64_t) {
      auto* dtensor = DTensorImpl::of(tensor);
      if (dtensor == nullptr) return at::Tensor();
      if (!keeps) dtensor->settle();
      if (may_replace && !call.is_written(i) && dtensor->dim() == 0 && !tensor.requires_grad() && dtensor->has_piece() &&
          dtensor->spec().is_replicated())
        return dtensor->local();
      has_dtensors = true;
      return at::Tensor();
    });
  return has_dtensors;
}

bool is_recorded(const OperatorCall& call) {
  if (!at::GradMode::is_enabled() || !call.info().records_whole) return false;
  bool needs_gradient = false;
  for (const auto& value : call.operands())
    for_tensors(value, [&](const at::Tensor& tensor, int64_t) { needs_gradient |= tensor.requires_grad(); });
  return needs_gradient;
}

/// Runs the operator on whole tensors, which autograd follows back to the pieces.
void run_recorded(const OperatorCall& call, torch::jit::Stack* stack) {
  for (size_t i = 0; i < call.count(); ++i)
    replace_tensors(call.operands()[i], [&](const at::Tensor& tensor, int64_t) {
      const auto* dtensor = DTensorImpl::of(tensor);
      if (dtensor == nullptr) return at::Tensor();
      TORCH_CHECK(!call.is_written(i) || !tensor.requires_grad() || !tensor.is_leaf(),
                  "a leaf Variable that requires grad is being used in an in-place operation.");
      require(
          !call.is_written(i),
          "{}: would write a value that needs a gradient to a tensor that is sharded over ranks, which autograd cannot record; "
          "write it in a torch::NoGradGuard, or write to fsdp::full_tensor(tensor)",
          call.op().schema().name());
      return tensor.requires_grad() && dtensor->has_piece() ? recorded_whole(tensor, call.name()) : dtensor->whole(call.name());
    });
  call.op().callBoxed(stack);
}

/// detach_: of a leaf (zero_grad calls it) there is nothing to do.
void keep(const OperatorCall& call) {
  const auto tensor = call.operand(0).toTensor();
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && meta->grad_fn_) {
    meta->set_requires_grad(false, tensor.unsafeGetTensorImpl());
    meta->grad_fn_.reset();
    meta->output_nr_ = 0;
  }
  call.give(tensor);
}

void set_data(const OperatorCall& call) {
  const auto self = call.operand(0).toTensor();
  require(DTensorImpl::of(self) != nullptr,
          "set_: an ordinary tensor would share memory with one that is sharded over ranks; use fsdp::full_tensor(tensor)");
  self.unsafeGetTensorImpl()->shallow_copy_from(call.operand(1).toTensor().getIntrusivePtr());
  call.give(self);
}

/// An ordinary tensor gets a DTensor's sizes: `plain.resize_as_(dtensor)`.
bool resize_plain(const OperatorCall& call) {
  if (call.name() != "resize_as_" || DTensorImpl::of(call.operand(0).toTensor()) != nullptr) return false;
  auto arguments = call.arguments();
  const auto like = arguments[1].toTensor();
  arguments[1] = at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(like.dtype()).device(at::kMeta));
  call.give_results(call.call(arguments), [](const at::Tensor&, int64_t) { return at::Tensor(); });
  return true;
}

[[noreturn]] void refuse(const OperatorCall& call) {
  std::string name = "a sharded tensor";
  for (const auto& value : call.operands())
    for_tensors(value, [&](const at::Tensor& tensor, int64_t) {
      const auto* dtensor = DTensorImpl::of(tensor);
      if (dtensor != nullptr && !dtensor->spec().name().empty()) name = dtensor->spec().name();
    });
  throw UsageError(fmt::format("{}: would change the sizes or memory of {}; write values with copy_ or set_data",
                               call.op().schema().name(), name));
}

void detach(const OperatorCall& call) {
  const auto tensor = call.operand(0).toTensor();
  const auto* impl = tensor.unsafeGetTensorImpl();
  call.give(at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true)));
}

/// Gathers the tensor whose values say where to split: the operator reads its memory, and a DTensor has none.
void read_sections(const OperatorCall& call) {
  if (call.name() != "tensor_split" || call.op().schema().overload_name() != "tensor_indices_or_sections") return;
  replace_tensors(call.operands()[1], [&](const at::Tensor& tensor, int64_t) { return whole_of(tensor, call.name()); });
}

bool run_by_rule(const OperatorCall& call) {
  switch (call.info().family) {
    case Family::kComposite:
      read_sections(call);
      call.run_parts();
      return true;
    case Family::kMayTakeData: call.give(true); return true;
    case Family::kKept: keep(call); return true;
    case Family::kSetData: set_data(call); return true;
    case Family::kRefused:
      if (resize_plain(call)) return true;
      refuse(call);
    case Family::kAlias: detach(call); return true;
    case Family::kLike: run_like(call, /*draws=*/false); return true;
    case Family::kDrawLike: run_like(call, /*draws=*/true); return true;
    case Family::kNew: run_new(call); return true;
    case Family::kView: run_view(call); return true;
    case Family::kPointwise: return run_pointwise(call);
    case Family::kAlongDim: return run_along_dim(call);
    case Family::kReduce: return run_reduction(call);
    case Family::kDot: return run_dot(call);
    case Family::kForeachNorm: return run_foreach_norm(call);
    case Family::kDraw: return run_draw(call);
    case Family::kGeneral: return false;
  }
  return false;
}

}  // namespace

void propagate(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  const OperatorCall call(op, below, stack);
  if (!read_scalars(call)) return op.callBoxed(stack);
  if (is_recorded(call)) return run_recorded(call, stack);
  if (!run_by_rule(call)) run_general(call);
}

}  // namespace fsdp
