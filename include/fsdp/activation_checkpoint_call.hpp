#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/activation_checkpoint_region.hpp"
#include "fsdp/nested_tensors.hpp"

// A part of fsdp/activation_checkpoint.hpp: how a call is kept to be made once more - its arguments, and what is called.
namespace fsdp::detail {

// How arguments are kept.
template <class T>
struct KeptArgument {
  using type = T;
};
template <class T>  // refers to what the caller may not keep
struct KeptArgument<c10::ArrayRef<T>> {
  using type = std::vector<T>;
};
template <class Input>
using kept_argument = typename KeptArgument<std::decay_t<Input>>::type;

template <class Input>
kept_argument<Input> keep(Input& input) {
  if constexpr (!std::is_same_v<kept_argument<Input>, std::decay_t<Input>>)
    return input.vec();
  else
    return input;
}

/// A kept argument as the caller passed it: by value, or as the kind of reference it was.
template <class Input, class Kept>
decltype(auto) pass(Kept& kept) {
  if constexpr (std::is_same_v<Kept, std::remove_cvref_t<Input>>)
    return static_cast<Input&&>(kept);
  else
    return std::remove_cvref_t<std::decay_t<Input>>(kept);
}

template <class Impl>
struct ModuleForward {
  std::shared_ptr<Impl> module;  // owns nothing if the module is no shared_ptr's
  template <class... Inputs>
  decltype(auto) operator()(Inputs&&... inputs) const {
    return module->forward(std::forward<Inputs>(inputs)...);
  }
};

template <class T>
inline constexpr bool is_module_pointer = false;
template <class Impl>
inline constexpr bool is_module_pointer<std::shared_ptr<Impl>> =
    std::is_base_of_v<torch::nn::Module, Impl>;

/// `function` to keep and call: a copy, or a module's forward.
template <class Function>
auto to_callee(Function& function) {
  using Plain = std::remove_cvref_t<Function>;
  if constexpr (std::is_base_of_v<torch::nn::Module, Plain>)
    return ModuleForward<Plain>{
        std::shared_ptr<Plain>(function.weak_from_this().lock(), &function)};
  else if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator, Plain>)
    return ModuleForward<typename std::remove_cvref_t<decltype(function.ptr())>::element_type>{
        function.ptr()};
  else if constexpr (is_module_pointer<Plain>)
    return ModuleForward<typename Plain::element_type>{function};
  else
    return std::decay_t<Function>(function);
}

template <class Callee>
const torch::nn::Module* module_of(const Callee&) {
  return nullptr;
}
template <class Impl>
const torch::nn::Module* module_of(const ModuleForward<Impl>& forward) {
  return forward.module.get();
}

template <class... Inputs, class Callee, class Kept>
Again run_again(const Callee& callee, const Kept& kept) {
  auto run = [callee, kept](const std::vector<at::Tensor>& tensors) {
    auto once = callee;  // as it was before forward
    auto arguments = kept;
    size_t next = 0;
    visit_tensors([&](at::Tensor& tensor) { tensor = tensors[next++]; }, arguments);
    [&]<size_t... index>(std::index_sequence<index...>) {
      std::invoke(once, pass<Inputs>(std::get<index>(arguments))...);
    }
    (std::index_sequence_for<Inputs...>());
  };
  return {std::move(run), module_of(callee)};
}

}  // namespace fsdp::detail
