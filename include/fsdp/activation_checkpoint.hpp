#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp {

/// How `checkpoint` runs a function.
struct CheckpointOptions {
  /// The recomputation draws the random numbers that forward drew, from the default generators of
  /// the CPU and of every device in use; afterwards they go on as if it had not been.
  bool preserves_rng_state = true;
  /// Generators of the function's own that are treated alike.
  std::vector<at::Generator> generators = {};
  /// Tensors that the function updates and reads in no later result, such as running statistics:
  /// the recomputation leaves them as it found them. Those of a module's normalisations are known.
  std::vector<at::Tensor> buffers = {};
  /// The recomputation ends, by an exception of its own that no std::exception is, as soon as all
  /// that backward needs is there. False: it runs to the function's end, for code that an exception
  /// must not pass.
  bool stops_early = true;
  /// Names the function in errors. Default: a module's class.
  std::string name = {};
};

namespace detail {

class CheckpointFrame;

/// How to run a checkpointed function once more.
struct Again {
  std::function<void(const std::vector<at::Tensor>& inputs)> run;
  const torch::nn::Module* module =
      nullptr;  ///< what it runs, if it is a module; kept alive by `run`
};

/// The forward of one checkpointed call: while it lives, nothing that autograd saves on this thread
/// is kept.
class CheckpointRegion {
 public:
  CheckpointRegion(const CheckpointOptions& options, std::vector<at::Tensor> inputs, Again again);
  /// Without `finish`, the call ends with an exception: its backward cannot run.
  ~CheckpointRegion();
  CheckpointRegion(const CheckpointRegion&) = delete;
  CheckpointRegion& operator=(const CheckpointRegion&) = delete;
  /// The function has returned. Throws UsageError if it has modified an input in place.
  void finish();

 private:
  class Active;
  std::shared_ptr<CheckpointFrame> frame_;
  std::unique_ptr<Active> active_;
  std::vector<at::Tensor> inputs_;
  std::vector<std::optional<int64_t>> versions_;  // by input; none: not watched
  bool is_finished_ = false;
};

// Which arguments hold tensors, and how they are kept.
template <class T>
inline constexpr bool holds_tensors = std::is_same_v<T, at::Tensor>;
template <class T>
inline constexpr bool holds_tensors<std::optional<T>> = holds_tensors<T>;
template <class T>
inline constexpr bool holds_tensors<std::vector<T>> = holds_tensors<T>;
template <class T, size_t count>
inline constexpr bool holds_tensors<std::array<T, count>> = holds_tensors<T>;
template <class First, class Second>
inline constexpr bool holds_tensors<std::pair<First, Second>> =
    holds_tensors<First> || holds_tensors<Second>;
template <class... Elements>
inline constexpr bool holds_tensors<std::tuple<Elements...>> = (... || holds_tensors<Elements>);

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

/// Calls `visit` with each tensor in `value`: alone, or in an optional, a vector, an array, a pair
/// or a tuple of such.
template <class Visit, class Value>
void visit_tensors(const Visit& visit, Value& value) {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (!holds_tensors<Value>) {
    return;
  } else if constexpr (requires { value.has_value(); }) {
    if (value) visit_tensors(visit, *value);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& element : value) visit_tensors(visit, element);
  } else {
    std::apply([&](auto&... elements) { (visit_tensors(visit, elements), ...); }, value);
  }
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

}  // namespace detail

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
