#include "tensor/shard_layout.hpp"

#include <algorithm>

#include "base/require.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

ShardLayout::ShardLayout(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t dim)
    : sizes_(sizes.vec()), strides_(strides.vec()), dim_(dim), rows_(1) {
  for (const int64_t size : sizes_)
    require(size >= 0, "shard layout: sizes must not be negative, got ({})", fmt::join(sizes_, ", "));
}

ShardLayout::ShardLayout(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t dim, int world_size)
    : ShardLayout(sizes, strides, dim) {
  require(world_size >= 1, "shard layout: the world size must be at least 1, got {}", world_size);
  world_size_ = world_size;
  if (!sizes_.empty()) rows_ = sizes_[static_cast<size_t>(dim)];
  int64_t others = 1;  // elements beside each row; empty dimensions are seen to below
  bool is_empty = rows_ == 0;
  for (size_t d = 0; d < sizes_.size(); ++d) {
    if (static_cast<int64_t>(d) == dim) continue;
    others *= sizes_[d];
    is_empty |= sizes_[d] == 0;
  }
  // A single row, or a single rank, leaves nothing to interleave; its stride may be anything.
  row_numel_ = rows_ > 1 && world_size > 1 && !is_empty ? strides_[static_cast<size_t>(dim)] : others;
  if (!is_empty) outer_ = others / row_numel_;
  rows_per_rank_ = (rows_ + world_size - 1) / world_size;
}

ShardLayout::ShardLayout(c10::IntArrayRef sizes, int world_size)
    : ShardLayout(sizes, row_major_strides(sizes), 0, world_size) {}

ShardLayout ShardLayout::flat(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                              std::vector<RowRange> ranges) {
  ShardLayout layout(sizes, strides, kFlat);
  layout.rows_ = c10::multiply_integers(sizes);
  layout.world_size_ = static_cast<int>(ranges.size());
  layout.ranges_ = std::move(ranges);
  return layout;
}

RowRange ShardLayout::range(int rank) const {
  require(rank >= 0 && rank < world_size_, "shard layout: expected a rank in [0, {}), got {}",
          world_size_, rank);
  if (is_flat()) return ranges_[static_cast<size_t>(rank)];
  const int64_t begin = std::min(rank * rows_per_rank_, rows_);
  return {begin, std::min(begin + rows_per_rank_, rows_)};
}

at::DimVector ShardLayout::local_sizes(int rank) const {
  const int64_t count = rows(rank);
  if (is_flat()) return {count};
  if (sizes_.empty()) return count == 1 ? at::DimVector{} : at::DimVector{0};
  at::DimVector local(sizes_.begin(), sizes_.end());
  local[static_cast<size_t>(dim_)] = count;
  return local;
}

at::DimVector ShardLayout::local_strides(int rank) const {
  if (is_flat() || (sizes_.empty() && rows(rank) == 0)) return {1};
  at::DimVector local(strides_.begin(), strides_.end());
  if (outer_ == 1) return local;
  for (size_t d = 0; d < local.size(); ++d)
    if (strides_[d] > strides_[static_cast<size_t>(dim_)])
      local[d] = strides_[d] / rows_ * std::max<int64_t>(rows(rank), 1);
  return local;
}

}  // namespace fsdp
