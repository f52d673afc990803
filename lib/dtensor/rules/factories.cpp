#include <ATen/ATen.h>

#include "dtensor/rules/propagate.hpp"
#include "tensor/strides.hpp"

// What makes tensors from a DTensor's form, and what draws random numbers. Every rank draws the whole from its generator and
// keeps its part: the numbers of the unsharded program, and generators that stay in step, without a gather.
namespace fsdp {

namespace {

at::TensorOptions options_of(const DTensorImpl& dtensor) {
  return at::TensorOptions().dtype(dtensor.dtype()).device(dtensor.device());
}

bool is_list_of(const c10::IValue& value, c10::IntArrayRef numbers) {
  return value.isIntList() && c10::IntArrayRef(value.toDimVector()) == numbers;
}

}  // namespace

void run_like(const OperatorCall& call, bool draws) {
  const auto tensor = call.operand(0).toTensor();
  const auto* dtensor = DTensorImpl::of(tensor);
  if (dtensor == nullptr) return run_general(call);  // one behind it is the DTensor
  const bool has_piece = dtensor->has_piece();
  if (has_piece && dtensor->spec().is_flat() && !call.in_format(dtensor->value().spec)) return run_general(call);
  auto arguments = call.arguments();
  if (draws || !has_piece)
    arguments[0] = at::empty_strided(dtensor->sizes(), dtensor->strides(), options_of(*dtensor));
  else
    arguments[0] = dtensor->local();
  const auto made = call.call_for_tensor(arguments);
  if (!has_piece) return call.give(made);
  const auto piece = draws ? copy_part_of(dtensor->spec(), made) : made;
  call.give(make_copy(piece, call.in_format(dtensor->value().spec)));
}

void run_new(const OperatorCall& call) {
  const auto tensor = call.operand(0).toTensor();
  const auto* dtensor = DTensorImpl::of(tensor);
  if (dtensor == nullptr) return run_general(call);
  // Of its own sizes: a gradient, say, which autograd clones so.
  const bool has_strides = call.name() == "new_empty_strided";
  const auto& own_strides = dtensor->spec().strides();
  const bool is_in_order = !dtensor->spec().is_flat() || own_strides == row_major_strides(dtensor->sizes());
  const bool is_alike = dtensor->has_piece() && dtensor->dim() > 0 && is_list_of(call.operand(1), dtensor->sizes()) &&
                        (has_strides ? is_list_of(call.operand(2), own_strides) : is_in_order);
  auto arguments = call.arguments();
  arguments[0] = at::empty({0}, options_of(*dtensor));
  if (is_alike) {
    arguments[1] = dtensor->local().sizes();
    if (has_strides) arguments[2] = dtensor->local().strides();  // of a flat layout: of its one dimension
  }
  const auto made = call.call_for_tensor(arguments);
  if (!is_alike) return call.give(made);
  // Row-major, whatever the operand is: random numbers are drawn in the order in which a tensor lies in memory.
  const auto& spec = dtensor->value().spec;
  const bool lies_as_operand = has_strides || spec->is_flat();
  call.give(make_dtensor(made, lies_as_operand ? spec : spec_like(*spec, spec->sizes(), spec->placements())));
}

bool run_draw(const OperatorCall& call) {
  const auto tensor = call.operand(0).toTensor();
  const auto* dtensor = DTensorImpl::of(tensor);
  if (dtensor == nullptr || !dtensor->has_piece()) return false;
  auto arguments = call.arguments();
  for (size_t i = 1; i < call.count(); ++i)
    replace_tensors(arguments[i], [&](const at::Tensor& other, int64_t) {
      return DTensorImpl::of(other) != nullptr ? whole_of(other, call.name()) : at::Tensor();
    });
  arguments[0] = at::empty_strided(dtensor->sizes(), dtensor->strides(), options_of(*dtensor));
  const auto drawn = call.call_for_tensor(arguments);
  dtensor->local().copy_(part_of(dtensor->spec(), drawn));
  call.give(tensor);
  return true;
}

}  // namespace fsdp
