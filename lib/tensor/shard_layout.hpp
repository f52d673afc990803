#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "fsdp/local_ranges.hpp"

namespace fsdp {

/// Rows [begin, end) of a tensor's dimension 0.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
  bool operator==(const RowRange&) const = default;
};

/// Who holds which rows of one tensor cut along dimension 0.
///
/// Rank r holds rows [r * c, (r + 1) * c) as far as they exist, for c = ceil(rows / world size):
/// the pieces of torch's `chunk`, followed by empty ones where it makes fewer than one per rank.
/// So the ranks' pieces, each padded to c rows and put one after another, are the tensor followed
/// by padding only. A 0-dim tensor counts as one row: rank 0 holds it, the others hold size {0}.
class ShardLayout {
 public:
  /// sizes: of the whole tensor. Throws UsageError for a negative size or a world size below 1.
  ShardLayout(c10::IntArrayRef sizes, int world_size);
  /// A 1-D tensor of `rows` elements.
  ShardLayout(int64_t rows, int world_size);

  int64_t rows() const { return rows_; }
  /// Elements in one row; 0 if a trailing dimension is empty.
  int64_t row_numel() const { return row_numel_; }
  int64_t numel() const { return rows_ * row_numel_; }
  int world_size() const { return world_size_; }

  /// Rows of the padded piece, the same on every rank: ceil(rows / world size).
  int64_t rows_per_rank() const { return rows_per_rank_; }
  /// The rows that `rank` holds, without padding; begin == end where it holds none.
  RowRange range(int rank) const;
  int64_t rows(int rank) const { return range(rank).count(); }
  int64_t local_numel(int rank) const { return rows(rank) * row_numel_; }
  /// True if no rank's piece needs padding.
  bool is_even() const { return padded_rows() == rows_; }

  int64_t padded_local_numel() const { return rows_per_rank_ * row_numel_; }
  int64_t padded_rows() const { return rows_per_rank_ * world_size_; }
  int64_t padded_numel() const { return padded_rows() * row_numel_; }

  /// Sizes of the whole tensor.
  const std::vector<int64_t>& sizes() const { return sizes_; }
  /// The same as elements of the whole tensor in row-major order; see fsdp::local_ranges.
  std::vector<ElementRange> element_ranges(int rank) const;
  /// Sizes of `rank`'s piece, without padding. Of a 0-dim tensor: {} on rank 0, {0} elsewhere.
  std::vector<int64_t> local_sizes(int rank) const;

 private:
  std::vector<int64_t> sizes_;
  int64_t rows_, row_numel_, rows_per_rank_;
  int world_size_;
};

}  // namespace fsdp
