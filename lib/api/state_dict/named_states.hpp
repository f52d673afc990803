#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/params/find_param.hpp"

namespace fsdp {

class RootContext;

/// One parameter or buffer of a module tree, with all the names that the plain module has for it.
struct NamedState {
  /// In depth-first order, a module's parameters before its buffers. The first is the one it is saved under.
  std::vector<std::string> names;
  at::Tensor tensor;                ///< the sharded parameter, another parameter, or the buffer
  std::optional<FoundParam> param;  ///< none: whole on this rank
  std::optional<at::ScalarType> dtype_before_cast;  ///< of a buffer that a policy has cast
};

/// Each tensor once.
std::vector<NamedState> named_states(const torch::nn::Module& module);

/// Sharded parameters whose storage was replaced since the last step (torch::load, set_data) are
/// recognised again: their values go where they belong. Throws StateError, naming the parameter, where
/// that cannot be.
void bring_home(RootContext& context);

/// Throws StateError, beginning with `caller`, while FullParameters shows parameters of the module.
/// Brings home what was replaced.
void require_not_shown(const torch::nn::Module& module, std::string_view caller);

}  // namespace fsdp
