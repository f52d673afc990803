#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/local_ranges.hpp"

namespace fsdp {

/// Indices [begin, end) of one dimension of a whole tensor.
using IndexRange = ElementRange;

/// Which indices of one dimension a piece holds, in the piece's order: ascending, none empty, none
/// that overlap or touch, so that equal sets are equal lists.
using IndexRanges = std::vector<IndexRange>;

/// Several indices that two pieces hold one after another.
struct IndexRun {
  int64_t first_position = 0;   ///< of the run in the first piece
  int64_t second_position = 0;  ///< and in the second
  int64_t count = 0;
  bool operator==(const IndexRun&) const = default;
};

/// Adds what lies behind the last range, joined with it where it continues it; nothing if it is empty.
void append(std::vector<ElementRange>& ranges, ElementRange next);

IndexRanges all_indices(int64_t size);
int64_t count(const IndexRanges& ranges);
/// Returns the indices at positions [begin, end) of those that `ranges` hold, one after another.
IndexRanges at_positions(const IndexRanges& ranges, int64_t begin, int64_t end);

/// Returns the `index`-th of `chunks` chunks of ceil(count / chunks) indices each, of which trailing ones may be short or
/// empty.
IndexRanges chunk(const IndexRanges& ranges, int64_t chunks, int64_t index);
/// Returns the `index`-th of `chunks` chunks of each of `stripes` chunks.
IndexRanges striped_chunk(const IndexRanges& ranges, int64_t stripes, int64_t chunks, int64_t index);

/// Puts ranges in order and joins adjacent ones. They come in any order, and do not overlap.
IndexRanges joined(std::vector<IndexRange> ranges);
IndexRanges intersection(const IndexRanges& a, const IndexRanges& b);
bool contains(const IndexRanges& all, const IndexRanges& part);

/// Finds where the indices that both hold are in each of them.
std::vector<IndexRun> common_runs(const IndexRanges& first, const IndexRanges& second);

}  // namespace fsdp
