#include "dispatch/residency_fallback.hpp"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "dispatch/stand_in/stand_in_call.hpp"
#include "dispatch/host_lock.hpp"
#include "dispatch/meta_factory.hpp"
#include "dispatch/operand_scan.hpp"
#include "dispatch/recomputation.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/rules/propagate.hpp"

namespace fsdp {
namespace {

void make_resident(const OperandScan& operands, int64_t task) {
  if (operands.touches_all_ready(task)) return;
  const auto& owners = operands.owners();
  const WithoutHostLock may_wait;
  owners[0]->make_resident({owners.data(), owners.size()},
                           {.records_autograd = operands.records_autograd(), .param_name = operands.first_param_name()});
}

template <c10::DispatchKey key>
void fall_back(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& info = info_of(op);
  const bool reads_data = !info.is_view && !info.is_transparent;
  const int64_t task = torch::autograd::get_current_graph_task_id();
  OperandScan operands(op, info, stack, /*may_cast=*/reads_data && runs_forward(task));
  operands.examine();
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
  if (operands.has_dtensors() || operands.means_pieces(task)) {
    const auto replaced = operands.use_dtensors();
    if (operands.has_dtensors()) {
      // Here, as a rank without elements of the DTensor would read nothing of what stands beside it, and gather nothing.
      if (reads_data && replaced.leaves_unsharded) make_resident(operands, task);
      propagate(op, below, stack);
      return operands.restore(replaced, stack);
    }
  }
  if (operands.has_stand_ins()) return call_with_stand_ins(op, below, stack);
  if (operands.owners().empty()) place_on_meta(op, stack);
  operands.follow_modes(task);
  if (reads_data && !operands.owners().empty()) make_resident(operands, task);
  operands.cast_operands();
  if (info.is_aten && !info.is_transparent) {
    c10::impl::ExcludeDispatchKeyGuard guard(key);
    op.redispatchBoxed(below, stack);
  } else {
    // Unknown code below may touch other groups, or this one later: keep watching.
    op.redispatchBoxed(below, stack);
  }
  operands.cast_results(stack);
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

void make_inner_fallback_known() {
  static const bool is_known = [] {
    static torch::Library all(torch::Library::IMPL, "_", kInnerResidencyKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&inner_residency_fallback>());
    // An operator made of others for every backend would take this key for a backend without a kernel, and LayerNorm, say,
    // would be computed in another way than without it: such operators get the fallback by name.
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

}  // namespace fsdp
