#pragma once

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/fully_shard.hpp"

namespace fsdp {

/// A step without backward, for evaluation or generation. Inside it groups are prefetched in the learned order and released as
/// in forward; at its end all of them are released. If autograd records, the backward that follows belongs to the same step.
class FSDP_API ForwardScope {
 public:
  explicit ForwardScope(const FSDPModule& root);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  std::shared_ptr<ModuleState> state_;
};

/// `auto scope = fsdp::forward_scope(root);`
[[nodiscard]] inline ForwardScope forward_scope(const FSDPModule& root) {
  return ForwardScope(root);
}

/// Casts of a module's floating-point inputs to param_dtype, if cast_forward_inputs is set, and of its floating-point outputs
/// to output_dtype, as its MixedPrecisionPolicy says. Of a module that the policy exempts: of inputs to its own dtype, of
/// outputs to output_dtype or, unset, to param_dtype. Recorded by autograd.
FSDP_API at::Tensor cast_boundary_input(const FSDPModule& module, const at::Tensor& input);
FSDP_API at::Tensor cast_boundary_output(const FSDPModule& module, const at::Tensor& output);

namespace detail {

/// While it lives, operators on the module's parameters return what they have computed, also where the policy exempts the
/// module: the boundary casts.
class FSDP_API BoundaryScope {
 public:
  explicit BoundaryScope(const FSDPModule& module);
  ~BoundaryScope();
  BoundaryScope(const BoundaryScope&) = delete;
  BoundaryScope& operator=(const BoundaryScope&) = delete;

 private:
  std::shared_ptr<ModuleState> state_;
  std::vector<std::optional<at::ScalarType>> output_dtypes_;  // of its parameters, outside
};

template <class T>
inline constexpr bool is_tuple = false;
template <class... Elements>
inline constexpr bool is_tuple<std::tuple<Elements...>> = true;
template <class First, class Second>
inline constexpr bool is_tuple<std::pair<First, Second>> = true;

/// `value` with `cast` applied to every tensor in it: alone, or in an optional, a vector or a tuple.
template <class Cast, class Value>
decltype(auto) cast_tensors(const Cast& cast, Value&& value) {
  using Plain = std::remove_cvref_t<Value>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    return cast(value);
  } else if constexpr (std::is_same_v<Plain, std::optional<at::Tensor>>) {
    return value ? std::optional<at::Tensor>(cast(*value)) : std::optional<at::Tensor>();
  } else if constexpr (std::is_same_v<Plain, std::vector<at::Tensor>>) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value) tensors.push_back(cast(tensor));
    return tensors;
  } else if constexpr (is_tuple<Plain>) {
    return std::apply(
        [&](auto&&... elements) {
          return Plain(cast_tensors(cast, std::forward<decltype(elements)>(elements))...);
        },
        std::forward<Value>(value));
  } else {
    return std::forward<Value>(value);  // as it came, a reference if it was one
  }
}

}  // namespace detail

/// Runs `module->forward(inputs...)` in a ForwardScope of its root, with inputs and outputs cast as by cast_boundary_input and
/// cast_boundary_output. Tensors are cast, also in optionals, vectors and tuples; other arguments are passed on.
template <class Holder, class... Inputs>
auto call(Holder&& module, Inputs&&... inputs) {
  using Output = std::remove_cvref_t<decltype(module->forward(std::forward<Inputs>(inputs)...))>;
  const auto found = find_fsdp_module(*module);
  if (!found) return Output(module->forward(std::forward<Inputs>(inputs)...));
  ForwardScope scope(*found);
  const detail::BoundaryScope boundary(*found);
  auto in = [&](const at::Tensor& tensor) { return cast_boundary_input(*found, tensor); };
  auto out = [&](const at::Tensor& tensor) { return cast_boundary_output(*found, tensor); };
  if constexpr (std::is_void_v<Output>)
    module->forward(detail::cast_tensors(in, std::forward<Inputs>(inputs))...);
  else
    return Output(detail::cast_tensors(
        out, module->forward(detail::cast_tensors(in, std::forward<Inputs>(inputs))...)));
}

}  // namespace fsdp
