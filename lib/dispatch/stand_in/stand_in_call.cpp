#include "dispatch/stand_in/stand_in_call.hpp"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/graph_task.h>

#include <span>

#include "dispatch/operand_cast.hpp"
#include "dispatch/recomputation.hpp"
#include "dispatch/residency.hpp"
#include "dispatch/stand_in/deferred_call.hpp"
#include "dispatch/stand_in/gradient_fork.hpp"
#include "dtensor/rules/operator_call.hpp"

namespace fsdp {

namespace {

using c10::IValue;
using Arguments = std::span<IValue>;

bool is_of_a_kind(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// Calls `visit(tensor, argument)` for every defined tensor among the operands.
template <class Visit>
void each_tensor(Arguments arguments, const Visit& visit) {
  for (size_t i = 0; i < arguments.size(); ++i)
    for_tensors(arguments[i], [&](const at::Tensor& tensor, int64_t) { visit(tensor, i); });
}

/// What stands beside the stand-ins.
struct Company {
  size_t stand_ins = 0;
  bool has_own_kind = false;   ///< gradients, optimizer state: no stand-ins themselves
  bool has_ordinary = false;   ///< tensors with elements of their own, which the kind refuses
  bool has_scalars = false;    ///< tensors without dimensions, which it takes
  bool is_of_scalar = false;   ///< a stand-in is a scalar parameter, or made of one
  bool needs_gradient = false;
};

Company company_of(Arguments arguments) {
  Company company;
  each_tensor(arguments, [&](const at::Tensor& tensor, size_t) {
    company.needs_gradient |= tensor.requires_grad();
    if (const auto stand_in = stand_in_of(tensor)) {
      ++company.stand_ins;
      company.is_of_scalar |= stand_in->is_of_scalar();
    } else if (is_of_a_kind(tensor)) {
      company.has_own_kind = true;
    } else if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return;
    } else if (has_residency_key(tensor.unsafeGetTensorImpl()) || tensor.dim() > 0) {
      company.has_ordinary = true;
    } else {
      company.has_scalars = true;
    }
  });
  return company;
}

/// Operators that take sizes or a dtype from another tensor, or only look at operands: no kind refuses them.
bool takes_any(const OperatorInfo& info) { return info.is_view || info.is_transparent; }

bool needs_unsharded(const Company& company, const OperatorInfo& info) {
  if (company.has_own_kind || takes_any(info)) return false;
  return company.has_ordinary ||
         (company.has_scalars && company.is_of_scalar && info.stands_for_unsharded && info.declared_writes == 0);
}

/// Mixed precision, as at a module's boundary.
bool may_cast(const OperatorInfo& info) {
  return info.declared_writes == 0 && info.stands_for_unsharded && runs_forward(torch::autograd::get_current_graph_task_id());
}

/// Whether the results can be had again from the unsharded parameters. A copy is the user's own from then on (EMA).
bool can_be_repeated(const c10::OperatorHandle& op, const Company& company, const OperatorInfo& info) {
  const auto& name = op.schema().name();
  const bool is_detach = name == "aten::detach" || name == "aten::alias";
  if (!info.is_aten || info.declared_writes != 0 || company.has_own_kind || company.has_ordinary) return false;
  if (!info.stands_for_unsharded && !is_detach) return false;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  const bool returns_one = op.schema().returns().size() == 1;
  if (returns_one && op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType && company.stand_ins > 1)
    return false;  // foreach
  return !info.is_clone || (at::GradMode::is_enabled() && company.needs_gradient);
}

std::vector<c10::intrusive_ptr<StandIn>> written_stand_ins(Arguments arguments, const OperatorInfo& info) {
  std::vector<c10::intrusive_ptr<StandIn>> written;
  if (info.declared_writes == 0) return written;
  each_tensor(arguments, [&](const at::Tensor& tensor, size_t argument) {
    if (!info.declares_write_of(argument)) return;
    if (auto stand_in = stand_in_of(tensor)) written.push_back(std::move(stand_in));
  });
  return written;
}

/// The operands with ordinary tensors in the place of stand-ins.
class Substitution {
 public:
  /// cast: is told what stand-ins want of the other operands.
  explicit Substitution(OperandCast& cast) : cast_(cast) {}

  /// Changes nothing and returns false where a stand-in stands for nothing.
  bool replace(Arguments arguments, const OperatorInfo& info) {
    std::vector<IValue> replaced(arguments.begin(), arguments.end());
    for (size_t i = 0; i < replaced.size(); ++i) {
      auto& value = replaced[i];
      if (value.isTensor()) {
        if (!replace(value, info.declares_write_of(i))) return false;
      } else if (value.isList()) {
        auto list = value.toList().copy();  // the caller's own may be behind it
        for (size_t j = 0; j < list.size(); ++j) {
          IValue element = list.get(j);
          if (!element.isTensor()) continue;
          if (!replace(element, info.declares_write_of(i))) return false;
          list.set(j, std::move(element));
        }
        value = std::move(list);
      }
    }
    std::move(replaced.begin(), replaced.end(), arguments.begin());
    return true;
  }

  /// An operator that writes returns what it was given.
  void restore_written(std::span<IValue> results) const {
    for (auto& result : results)
      for (const auto& [ordinary, shown] : written_)
        if (result.isTensor() && result.toTensor().is_same(ordinary)) result = shown;
  }

 private:
  bool replace(IValue& value, bool is_written) {
    const auto& tensor = value.toTensor();
    const auto stand_in = tensor.defined() ? stand_in_of(tensor) : nullptr;
    if (!stand_in) return true;
    auto ordinary = stand_in->ordinary();
    if (!ordinary.defined()) return false;
    if (is_written)
      written_.emplace_back(ordinary, tensor);
    else if (at::GradMode::is_enabled() && tensor.requires_grad() && !ordinary.requires_grad() && !stand_in->leaf().defined())
      ordinary = with_history_of(tensor, ordinary);
    if (stand_in->casts_operands() && at::isFloatingType(ordinary.scalar_type())) cast_.cast_to(ordinary.scalar_type());
    value = std::move(ordinary);
    return true;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // with what is shown of them
  OperandCast& cast_;
};

}  // namespace

void call_with_stand_ins(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& info = info_of(op);
  const auto end = c10::make_scope_exit(&end_leading);
  const size_t count = op.schema().arguments().size(), results = op.schema().returns().size();
  const Arguments arguments(stack->data() + (stack->size() - count), count);
  const auto company = company_of(arguments);
  if (needs_unsharded(company, info)) {
    OperandCast cast;
    Substitution substitution(cast);
    if (substitution.replace(arguments, info)) {
      // Statistics, too: on CPU a batch norm refuses others than its weight's dtype.
      if (may_cast(info)) cast.cast_operands(arguments, /*statistics=*/0);
      op.callBoxed(stack);
      substitution.restore_written({stack->data() + (stack->size() - results), results});
      return;
    }
  }
  std::shared_ptr<DeferredCall> call;
  if (can_be_repeated(op, company, info)) call = std::make_shared<DeferredCall>(op, arguments);
  const auto written = written_stand_ins(arguments, info);
  const size_t below = stack->size() - count;
  try {
    op.redispatchBoxed(keys, stack);
  } catch (const std::exception& error) {
    auto repeated = call && call->is_refusal(error) ? call->repeat() : torch::jit::Stack();
    if (repeated.empty()) throw;
    stack->resize(below);
    std::move(repeated.begin(), repeated.end(), std::back_inserter(*stack));
    return;
  }
  // The kind's own operators, below this key, are not seen.
  for (const auto& stand_in : written) stand_in->note_write();
  if (call) make_results_stand_in(call, *stack, results, info.is_view);
}

}  // namespace fsdp
