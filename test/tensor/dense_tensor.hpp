#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "support/draw.hpp"

namespace fsdp::test {

/// Sizes with dimensions in a random order in memory; element i holds i, counted row-major.
inline at::Tensor draw_dense(Draw& draw) {
  auto sizes = draw.sizes(0, 4, 6);
  std::vector<int64_t> order(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = static_cast<int64_t>(d);
  for (size_t d = order.size(); d > 1; --d) std::swap(order[d - 1], order[draw.between(0, static_cast<int64_t>(d) - 1)]);
  const auto whole = at::arange(c10::multiply_integers(sizes), at::kLong).view(sizes);
  std::vector<int64_t> back(order.size());
  for (size_t d = 0; d < order.size(); ++d) back[order[d]] = static_cast<int64_t>(d);
  return sizes.empty() ? whole : whole.permute(order).contiguous().permute(back);
}

}  // namespace fsdp::test
