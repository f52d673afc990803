#include "fsdp/placement.hpp"

#include <fmt/format.h>

namespace fsdp {
namespace {

struct ToString {
  std::string operator()(const Shard& shard) const { return fmt::format("Shard({})", shard.dim); }
  std::string operator()(const StridedShard& shard) const {
    return fmt::format("StridedShard(dim={}, split_factor={})", shard.dim, shard.split_factor);
  }
  std::string operator()(const Replicate&) const { return "Replicate()"; }
  std::string operator()(const Partial& partial) const {
    switch (partial.op) {
      case ReduceOp::kMax: return "Partial(max)";
      case ReduceOp::kMin: return "Partial(min)";
      case ReduceOp::kSum: break;
    }
    return "Partial(sum)";
  }
};

}  // namespace

std::string to_string(const Placement& placement) { return std::visit(ToString{}, placement); }

std::string to_string(const std::vector<Placement>& placements) {
  std::string text = "(";
  for (const Placement& placement : placements)
    text += (text.size() > 1 ? ", " : "") + to_string(placement);
  return text + ")";
}

}  // namespace fsdp
