#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fsdp/api.hpp"

namespace fsdp {

/// Elements [begin, end) of a whole tensor, counted in row-major order of its sizes.
struct FSDP_API ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

/// The elements of a sharded module's parameter that this rank holds, for any layout, in the order of the sharded parameter
/// read row-major. Empty ranges are left out and adjacent ones joined. For a tensor-parallel parameter, elements of the whole
/// tensor. No communication. Throws UsageError for any other tensor.
FSDP_API std::vector<ElementRange> local_ranges(const at::Tensor& parameter);

}  // namespace fsdp
