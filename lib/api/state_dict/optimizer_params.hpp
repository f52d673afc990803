#pragma once

#include <torch/optim/optimizer.h>

#include <string_view>
#include <vector>

#include "api/state_dict/named_states.hpp"
#include "fsdp/optimizer_state_dict.hpp"

namespace fsdp {

/// One parameter of an optimizer, as the module knows it.
struct OptimizerParam {
  at::Tensor tensor;
  std::optional<FoundParam> param;
  std::vector<std::string> names;
  size_t group;  ///< of the optimizer
};

/// The optimizer's parameters by position. Throws UsageError, beginning with `caller`, for one that is not
/// the module's, or is an unsharded parameter.
std::vector<OptimizerParam> optimizer_params(const std::vector<NamedState>& states,
                                             const torch::optim::Optimizer& optimizer,
                                             std::string_view caller);

/// "AdamW", ...: of the first group. Throws UsageError for a class that is not known, or no group.
std::string optimizer_class(const torch::optim::Optimizer& optimizer, std::string_view caller);

using OptimizerOption = OptimizerStateDict::Option;
std::map<std::string, OptimizerOption> read_options(const torch::optim::OptimizerOptions& options);
/// Throws UsageError for a value of another kind than the option's.
void write_options(torch::optim::OptimizerOptions& options,
                   const std::map<std::string, OptimizerOption>& values);

}  // namespace fsdp
