#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

// LibTorch's optimizers keep their state and options in a struct each, without a way to list the
// members: this is the list, for AdamW, Adam, SGD, Adagrad and RMSprop.
namespace fsdp {

inline constexpr auto kKnownOptimizers = "AdamW, Adam, SGD, Adagrad, RMSprop";

struct StateFields {
  /// All of them have the parameter's shape. Some may be undefined.
  std::vector<std::pair<std::string, at::Tensor*>> tensors;
  int64_t* step = nullptr;  ///< null: not counted
};
/// nullopt for another class.
std::optional<StateFields> fields_of(torch::optim::OptimizerParamState& state);

struct OptionFields {
  using Field = std::variant<double*, bool*, std::tuple<double, double>*>;
  std::string optimizer;  ///< "AdamW", ...
  std::vector<std::pair<std::string, Field>> fields;
};
std::optional<OptionFields> fields_of(torch::optim::OptimizerOptions& options);

/// An empty state for a parameter of this optimizer, by the name that `OptionFields` gives it.
std::unique_ptr<torch::optim::OptimizerParamState> new_state(const std::string& optimizer);

}  // namespace fsdp
