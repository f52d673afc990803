#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/reduce_scatter.hpp"

namespace fsdp {

/// What of a group's gradients is summed in one dtype: one reduce-scatter, and one all-reduce where there are replicas.
struct ReduceBucket {
  at::ScalarType dtype;
  std::vector<size_t> indices = {};  ///< of the parameters, by entry
  std::vector<ReduceEntry> entries = {};
  std::vector<ReduceSegment> segments = {};
  int64_t slot_bytes = 0;  ///< of its inputs in registered memory
  ReduceScatter reduce_scatter = {};
  std::shared_ptr<Work> all_reduce = nullptr;
  at::Tensor hook_input = {};  ///< what an all-reduce hook was given: its collective may read it yet
  bool is_divided = false;     ///< by a collective, or by the hook
};

/// A group's gradients, taken for one reduction.
struct ReduceInputs {
  std::vector<ReduceBucket> buckets = {};
  /// One rank: the gradients themselves, by parameter.
  std::vector<std::pair<size_t, at::Tensor>> alone = {};
};

}  // namespace fsdp
