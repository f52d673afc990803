#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// Tensor dimension `dim` is cut in chunks of ceil(n / W) rows; trailing ranks may be short or empty.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};

/// Every rank of the mesh dimension holds the whole.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// Every rank holds a summand (or what `op` combines).
struct Partial {
  ReduceOp op = ReduceOp::kSum;
  bool operator==(const Partial&) const = default;
};

/// What one mesh dimension does with a tensor.
using Placement = std::variant<Shard, Replicate, Partial>;

/// How a group's parameters are cut over the ranks that shard them.
enum class ParamLayout {
  /// Every parameter by itself, along one of its dimensions: Shard(0) unless asked otherwise.
  kPerParameter,
  /// One after another in one buffer that is cut in equal pieces, wherever that may be in a parameter (P3):
  /// nothing is padded but the end, and nothing is copied around an all-gather.
  kFlat,
};

/// "Shard(0)", "Replicate()", "Partial(sum)".
std::string to_string(const Placement& placement);
std::string to_string(const std::vector<Placement>& placements);

}  // namespace fsdp
