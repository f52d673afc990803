#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "dispatch/residency.hpp"
#include "dispatch/residency_fallback.hpp"

namespace fsdp {

/// Note [Unboxed kernels]
/// Boxing its operands is most of what the fallback costs (600 to 2,000 instructions an operator, and about a
/// hundred an element of a list). So the operators that touch parameters most often get a kernel with their own
/// signature, which asks the one question that nearly always has the answer yes and leaves every other case to
/// the fallback. Semantics live there alone.

/// Op: one of at::_ops.
template <class Op, class Result, class... Args>
Result call_residency_fallback(c10::DispatchKeySet keys, Args... args) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  static const auto fallback = c10::BoxedKernel::makeFromFunction<&residency_fallback>();
  return c10::impl::BoxedKernelWrapper<Result(Args...)>::call(fallback, op, keys, std::forward<Args>(args)...);
}

/// The keys below the residency key.
inline c10::DispatchKeySet below_residency(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kResidencyKey);
}

/// Kernel: a class with a static `call(DispatchKeySet, arguments of Op...)`.
template <class Op, class Kernel>
void add_residency_kernel(torch::Library& library) {
  std::string name = Op::name;
  if (Op::overload_name[0] != '\0') name += std::string(".") + Op::overload_name;
  library.impl(name.c_str(), torch::dispatch(kResidencyKey, TORCH_FN((Kernel::call))));
}

}  // namespace fsdp
