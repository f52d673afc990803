#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <string>

#include "dtensor/rules/operator_call.hpp"

namespace fsdp {

/// Note [Sharding propagation]
/// An operator with DTensors among its operands runs by the rule of its family: on pieces where that gives pieces of the
/// result, else by the general rule. That one is right for every operator: it gathers, runs the operator on ordinary tensors,
/// and cuts back what was written. Which rule applies follows from sizes and placements of the whole alone, so all ranks take
/// the same, and collectives never cross. A rank without elements runs what the others run, on some that nobody sees, so that
/// it refuses what they refuse.
///
/// Views write through to what they show, but for those by a bit (conj): they are copies. One that would show memory as another
/// dtype is refused. Schemas that do not say what is written (batch norms) and operators made of others that read memory by
/// themselves are named in operator_names.cpp; the generated test over all operators (test/dtensor) finds them.
///
/// What autograd would record runs on whole tensors, gathered with a gradient: no piece has a history.

/// Runs the operator, whose operands are the last on the stack, and puts its results in their place. below: the keys
/// below the residency key. May call collectives.
void propagate(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack);

/// Counts how often operators took the general rule, by name, in this process.
std::map<std::string, int64_t> general_rule_counts();

/// Note [Ranks without elements]
/// A rank that has none of a tensor's elements runs the operator all the same, on some that nobody sees: so that it refuses
/// what the others refuse, and where there are no dimensions (its piece has sizes {0}) takes a scalar for a scalar. What the
/// operator writes is written on it, too: a parameter with a new version is gathered anew, by all ranks or by none.
///
/// Makes some for such a piece. is_scalar: of a tensor without dimensions.
at::Tensor with_elements(const at::Tensor& piece, bool is_scalar);

// The rules. Those that may not apply return false, and have done nothing then.
void run_general(const OperatorCall& call);
bool run_pointwise(const OperatorCall& call);
bool run_along_dim(const OperatorCall& call);
bool run_reduction(const OperatorCall& call);
bool run_dot(const OperatorCall& call);
bool run_foreach_norm(const OperatorCall& call);
bool run_draw(const OperatorCall& call);
void run_like(const OperatorCall& call, bool draws);
void run_new(const OperatorCall& call);
void run_view(const OperatorCall& call);

}  // namespace fsdp
