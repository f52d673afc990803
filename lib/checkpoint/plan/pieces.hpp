#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/plan/file_plan.hpp"
#include "fsdp/local_ranges.hpp"

namespace fsdp {

/// Elements that lie one after another both in a file and in a rank's local tensor.
struct FilePiece {
  size_t file = 0;
  int64_t offset = 0;       ///< in the file, bytes
  size_t tensor = 0;        ///< of the rank's
  int64_t local_begin = 0;  ///< elements
  int64_t count = 0;        ///< elements
};

/// Positions [begin, end) of what a rank holds of a tensor, in the order of its local tensor.
struct Positions {
  int64_t begin = 0, end = 0;
};

/// Returns what the `index`-th of `sharers` ranks writes of `count` elements that all of them hold. What is small is written by
/// one of them, chosen by `turn` so that all get some.
Positions share_of(int64_t count, int64_t element_bytes, int64_t sharers, int64_t index, int64_t turn);

/// Adds the pieces of one tensor, of which the rank holds `ranges`, to `pieces`.
void add_pieces(std::vector<FilePiece>& pieces, size_t tensor, std::span<const ElementRange> ranges, Positions positions,
                const FilePlace& place, int64_t element_bytes);

/// Sorts the pieces in the order of the files.
void sort(std::vector<FilePiece>& pieces);

}  // namespace fsdp
