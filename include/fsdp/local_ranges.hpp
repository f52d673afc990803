#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp {

/// Elements [begin, end) of a whole tensor, counted in row-major order of its sizes.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

/// Which elements of a sharded module's parameter this rank holds, whatever its layout: in the
/// order in which the sharded parameter, read row-major, holds them. Ranges of no elements are
/// left out; none at all where this rank holds nothing. Adjacent ones are joined. Of a tensor-parallel
/// parameter: elements of the whole tensor, over all its ranks.
/// No communication. Throws UsageError for any other tensor.
std::vector<ElementRange> local_ranges(const at::Tensor& parameter);

}  // namespace fsdp
