#include "tensor/shard_layout.hpp"

#include <algorithm>

#include "base/require.hpp"

namespace fsdp {

ShardLayout::ShardLayout(c10::IntArrayRef sizes, int world_size)
    : sizes_(sizes.vec()),
      rows_(sizes.empty() ? 1 : sizes[0]),
      row_numel_(1),
      rows_per_rank_(0),
      world_size_(world_size) {
  require(world_size >= 1, "shard layout: the world size must be at least 1, got {}", world_size);
  for (const int64_t size : sizes_)
    require(size >= 0, "shard layout: sizes must not be negative, got ({})", fmt::join(sizes_, ", "));
  for (size_t dim = 1; dim < sizes_.size(); ++dim) row_numel_ *= sizes_[dim];
  rows_per_rank_ = (rows_ + world_size - 1) / world_size;
}

ShardLayout::ShardLayout(int64_t rows, int world_size)
    : ShardLayout(c10::IntArrayRef(&rows, 1), world_size) {}

RowRange ShardLayout::range(int rank) const {
  require(rank >= 0 && rank < world_size_, "shard layout: expected a rank in [0, {}), got {}",
          world_size_, rank);
  const int64_t begin = std::min(rank * rows_per_rank_, rows_);
  return {begin, std::min(begin + rows_per_rank_, rows_)};
}

std::vector<ElementRange> ShardLayout::element_ranges(int rank) const {
  const auto rows = range(rank);
  if (local_numel(rank) == 0) return {};
  return {{rows.begin * row_numel_, rows.end * row_numel_}};
}

std::vector<int64_t> ShardLayout::local_sizes(int rank) const {
  const int64_t count = rows(rank);
  if (sizes_.empty()) return count == 1 ? std::vector<int64_t>{} : std::vector<int64_t>{0};
  std::vector<int64_t> local = sizes_;
  local[0] = count;
  return local;
}

}  // namespace fsdp
