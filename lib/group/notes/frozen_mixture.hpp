#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

class ParamGroup;

/// The parameters of a group that need no gradient, and those that do.
struct FrozenMixture {
  struct Part {
    int64_t bytes = 0;  ///< unsharded, in the dtypes that are gathered
    std::vector<std::string> names;
  };
  Part frozen, trainable;
  /// Bytes of zeros that are reduced for frozen parameters: those of a flat run in which others need gradients, frozen after
  /// the run was laid out.
  int64_t extra_gradient_bytes = 0;

  bool is_mixed() const { return !frozen.names.empty() && !trainable.names.empty(); }
  /// "512 bytes are frozen (a.weight), 608 bytes are trainable (a.bias, b); 0 extra gradient bytes"
  std::string to_string() const;
};

/// Finds the mixture that a step would find if it began now.
FrozenMixture mixture_of(const ParamGroup& group);

/// Lists the names for a person: all, or the first of many.
std::string listed(const std::vector<std::string>& names);

}  // namespace fsdp
