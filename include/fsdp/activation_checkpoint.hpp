#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/activation_checkpoint_call.hpp"
#include "fsdp/activation_checkpoint_region.hpp"

namespace fsdp {

/// Activation checkpointing: runs `function(inputs...)` and saves only the inputs for backward. When backward first needs a
/// tensor that autograd would have saved, the function runs once more; the recomputed tensors are freed as they are used.
/// Returns what the function returns. This is torch.utils.checkpoint with use_reentrant=False, for LibTorch.
///
/// function: a callable, which is copied; what it captures by reference has to live until backward. Or a module (holder,
///   shared_ptr or reference), whose `forward` is called.
/// inputs: anything that can be copied. Tensors, also in optionals, vectors, arrays, pairs and tuples, are saved as autograd
///   saves tensors: do not modify them in place before backward.
///
/// The function has to do the same each time: save the same tensors in the same order. Random numbers and autocast are
/// restored. Checkpoints may be nested, and backward may run several times (retain_graph) or for a part of the graph. If
/// autograd does not record, the function just runs.
///
/// Sharded modules may be inside or around it. All-gathers of the recomputation belong to backward: they are learned and
/// prefetched with it. Casts are those of forward.
///
/// Throws UsageError if the function modifies an input in place. Backward throws UsageError if the recomputation saved other
/// tensors than forward (number, shapes, dtypes or devices), StateError if a parameter that forward used was written since,
/// and what the function throws.
template <class Function, class... Inputs>
decltype(auto) activation_checkpoint(const ActivationCheckpointOptions& options, Function&& function,
                          Inputs&&... inputs) {
  auto callee = detail::to_callee(function);
  constexpr bool is_module = !std::is_same_v<decltype(callee), std::decay_t<Function>>;
  auto run = [&]() -> decltype(auto) {
    if constexpr (is_module)
      return callee(std::forward<Inputs>(inputs)...);
    else
      return std::invoke(std::forward<Function>(function), std::forward<Inputs>(inputs)...);
  };
  if (!at::GradMode::is_enabled()) return run();

  auto kept = std::tuple<detail::kept_argument<Inputs>...>(detail::keep(inputs)...);
  std::vector<at::Tensor> tensors;
  detail::visit_tensors([&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, {})); },
                        kept);
  detail::CheckpointRegion region(options, std::move(tensors),
                                  detail::run_again<Inputs...>(callee, kept));
  if constexpr (std::is_void_v<decltype(run())>) {
    run();
    region.finish();
  } else {
    decltype(auto) output = run();
    region.finish();
    return output;
  }
}

template <class Function, class... Inputs>
requires(!std::is_same_v<std::remove_cvref_t<Function>, ActivationCheckpointOptions>) decltype(auto)
    activation_checkpoint(Function&& function, Inputs&&... inputs) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::forward<Function>(function),
                    std::forward<Inputs>(inputs)...);
}

// 0.1's names.
using CheckpointOptions [[deprecated("use ActivationCheckpointOptions")]] = ActivationCheckpointOptions;
template <class... Arguments>
[[deprecated("use activation_checkpoint")]] decltype(auto) checkpoint(Arguments&&... arguments) {
  return activation_checkpoint(std::forward<Arguments>(arguments)...);
}

}  // namespace fsdp
