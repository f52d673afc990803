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

/// Runs `function(inputs...)`, and keeps for backward its inputs alone: what autograd would have
/// saved within it is recomputed when backward first asks for it, by running the function once
/// more, and released as it is used. Returns what the function returns, anything. (LibTorch's
/// counterpart of torch.utils.checkpoint with use_reentrant=False.)
///
/// function: a callable, which is copied (what it captures by reference must outlive backward); or
/// a
///   module (holder, shared_ptr or reference), whose `forward` is called.
/// inputs: anything that can be copied. Tensors among them (alone, or in optionals, vectors,
/// arrays,
///   pairs and tuples) are kept as autograd keeps what it saves: they must not be modified in place
///   before their backward.
///
/// The function must do the same each time: save the same tensors in the same order. Random numbers
/// and autocast are as in forward. Checkpoints may be nested, and their graph used by several
/// backwards (retain_graph) or by a part of one. Where autograd records nothing, the function just
/// runs.
///
/// Sharded modules may be inside or around. The recomputation casts as forward did; what it gathers
/// is a part of the backward, learned and prefetched like the rest of it, and so it is a
/// collective.
///
/// Throws UsageError if the function modifies an input in place. In backward: UsageError if the
/// recomputation saved other tensors than forward (count, shapes, dtypes, devices); StateError if a
/// parameter that forward used was written in between; and whatever the function throws.
template <class Function, class... Inputs>
decltype(auto) checkpoint(const CheckpointOptions& options, Function&& function,
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
requires(!std::is_same_v<std::remove_cvref_t<Function>, CheckpointOptions>) decltype(auto)
    checkpoint(Function&& function, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions{}, std::forward<Function>(function),
                    std::forward<Inputs>(inputs)...);
}

}  // namespace fsdp
