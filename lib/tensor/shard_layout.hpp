#pragma once

#include <ATen/core/DimVector.h>

#include <cstdint>
#include <vector>

#include "fsdp/local_ranges.hpp"

namespace fsdp {

/// Rows [begin, end) of what is cut.
using RowRange = ElementRange;

/// Who holds what of one tensor that W ranks share, in numbers; what follows from them for tensors: shard_part.hpp.
///
/// In memory a dense tensor is [outer][rows][row_numel], for whichever dimension is cut in rows. Three
/// cuts:
/// - along dimension 0: rank r holds rows [r * c, (r + 1) * c) as far as they exist, for
///   c = ceil(rows / W): the pieces of torch's `chunk`, followed by empty ones where it makes fewer.
///   A 0-dim tensor counts as one row: rank 0 holds it, the others hold size {0}.
/// - along another dimension: the same.
/// - flat: any range of the elements as they lie in memory; every rank may have another count.
///
/// Where outer is 1 (always so for dimension 0 of a row-major tensor, and for flat), the ranks' pieces,
/// chunks padded to c rows, put one after another, are the tensor followed by padding only.
class ShardLayout {
 public:
  /// Cuts a row-major tensor along dimension 0; one size alone is that of a 1-D tensor. Throws UsageError for a negative size
  /// or a world size below 1.
  ShardLayout(c10::IntArrayRef sizes, int world_size);
  /// Cuts a tensor along `dim` (of a 0-dim tensor: 0). strides: dense, without gaps or overlaps.
  ShardLayout(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t dim, int world_size);
  /// Makes a flat layout. ranges: by rank, adjacent, together all elements.
  static ShardLayout flat(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                          std::vector<RowRange> ranges);

  /// Sizes and strides of the whole tensor, in memory.
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  bool is_flat() const { return dim_ == kFlat; }
  /// True for one rank, whose piece is the tensor itself.
  bool is_whole() const { return world_size_ == 1 && !is_flat(); }
  /// The dimension that is cut. Not for a flat layout.
  int64_t dim() const { return dim_; }
  int64_t outer() const { return outer_; }
  int64_t rows() const { return rows_; }
  /// Elements in one row, of one of the `outer()` parts; 0 if a dimension inside is empty.
  int64_t row_numel() const { return row_numel_; }
  int64_t numel() const { return outer_ * rows_ * row_numel_; }
  int world_size() const { return world_size_; }

  /// The rows that `rank` holds, without padding; begin == end where it holds none.
  RowRange range(int rank) const;
  int64_t rows(int rank) const { return range(rank).count(); }
  int64_t local_numel(int rank) const { return outer_ * rows(rank) * row_numel_; }
  /// Elements of a piece with its padding, the same on every rank. Not for a flat layout.
  int64_t padded_local_numel() const { return outer_ * rows_per_rank_ * row_numel_; }

  /// Sizes of `rank`'s piece, without padding. Of a 0-dim tensor: {} on rank 0, {0} elsewhere. Flat: 1-D.
  at::DimVector local_sizes(int rank) const;
  /// Its strides: dimensions in the whole tensor's order, without gaps.
  at::DimVector local_strides(int rank) const;

  /// True for the same tensor cut alike: every rank holds the same, as it lies in memory.
  bool operator==(const ShardLayout&) const = default;

 private:
  static constexpr int64_t kFlat = -1;

  ShardLayout(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t dim);

  std::vector<int64_t> sizes_, strides_;
  int64_t dim_;
  int64_t outer_ = 1, rows_, row_numel_ = 1, rows_per_rank_ = 0;
  int world_size_ = 1;
  std::vector<RowRange> ranges_;  // flat: by rank
};

}  // namespace fsdp
