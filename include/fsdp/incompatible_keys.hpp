#pragma once

#include <string>
#include <vector>

#include "fsdp/api.hpp"

namespace fsdp {

/// Names, in quotes, of tensors in a state dict or a checkpoint that do not fit the module or the optimizer.
struct FSDP_API IncompatibleKeys {
  std::vector<std::string> missing = {};     ///< of the module, or asked for, but not in what is loaded
  std::vector<std::string> unexpected = {};  ///< in what is loaded, but not asked for; of a checkpoint, by no rank
  std::vector<std::string> wrong = {};       ///< other sizes, another layout or a dtype that cannot be converted, with both

  bool empty() const { return missing.empty() && unexpected.empty() && wrong.empty(); }

  [[deprecated("use empty()")]] bool fits() const { return empty(); }
  [[deprecated("use empty()")]] bool none() const { return empty(); }
};

using LoadResult [[deprecated("use IncompatibleKeys")]] = IncompatibleKeys;
using CheckpointMisfits [[deprecated("use IncompatibleKeys")]] = IncompatibleKeys;

}  // namespace fsdp
