#pragma once

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/fully_shard.hpp"
#include "fsdp/nested_tensors.hpp"

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

/// Returns the device on which the inputs of a call belong: that of the module's mesh, if it is no CPU and the call is the
/// outermost one of its root. nullopt: they stay where they are.
FSDP_API std::optional<c10::Device> input_device(const FSDPModule& module);

inline at::Tensor moved_to(const std::optional<c10::Device>& device, const at::Tensor& input) {
  return device && input.defined() && input.device() != *device ? input.to(*device) : input;
}

}  // namespace detail

/// Runs `module->forward(inputs...)` in a ForwardScope of its root, with inputs and outputs cast as by cast_boundary_input and
/// cast_boundary_output. The outermost call of a root, outside of a ForwardScope, moves inputs to the device of the module's
/// mesh, where that is no CPU, before anything is gathered. Tensors are moved and cast, also in optionals, vectors, arrays,
/// maps and tuples, which forward gets by value; other arguments are passed on.
template <class Holder, class... Inputs>
auto call(Holder&& module, Inputs&&... inputs) {
  using Output = std::remove_cvref_t<decltype(module->forward(std::forward<Inputs>(inputs)...))>;
  const auto found = find_fsdp_module(*module);
  if (!found) return Output(module->forward(std::forward<Inputs>(inputs)...));
  const auto device = detail::input_device(*found);
  ForwardScope scope(*found);
  const detail::BoundaryScope boundary(*found);
  auto in = [&](const at::Tensor& tensor) { return cast_boundary_input(*found, detail::moved_to(device, tensor)); };
  auto out = [&](const at::Tensor& tensor) { return cast_boundary_output(*found, tensor); };
  if constexpr (std::is_void_v<Output>)
    module->forward(detail::map_tensors(in, std::forward<Inputs>(inputs))...);
  else
    return Output(detail::map_tensors(
        out, module->forward(detail::map_tensors(in, std::forward<Inputs>(inputs))...)));
}

}  // namespace fsdp
