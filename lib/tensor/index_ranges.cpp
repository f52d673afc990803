#include "tensor/index_ranges.hpp"

#include <algorithm>

namespace fsdp {

void append(std::vector<ElementRange>& ranges, ElementRange next) {
  if (next.count() <= 0) return;
  if (!ranges.empty() && ranges.back().end == next.begin)
    ranges.back().end = next.end;
  else
    ranges.push_back(next);
}

IndexRanges at_positions(const IndexRanges& ranges, int64_t begin, int64_t end) {
  IndexRanges found;
  int64_t position = 0;
  for (const IndexRange& range : ranges) {
    const int64_t skipped = range.begin - position;
    append(found, {std::max(range.begin, begin + skipped), std::min(range.end, end + skipped)});
    position += range.count();
    if (position >= end) break;
  }
  return found;
}

IndexRanges all_indices(int64_t size) {
  return size > 0 ? IndexRanges{{0, size}} : IndexRanges{};
}

int64_t count(const IndexRanges& ranges) {
  int64_t total = 0;
  for (const IndexRange& range : ranges) total += range.count();
  return total;
}

IndexRanges chunk(const IndexRanges& ranges, int64_t chunks, int64_t index) {
  const int64_t total = count(ranges);
  const int64_t each = total / chunks + (total % chunks != 0);
  // Beyond the end the product might not fit.
  if (each == 0 || index > total / each) return {};
  return at_positions(ranges, index * each, (index + 1) * each);
}

IndexRanges striped_chunk(const IndexRanges& ranges, int64_t stripes, int64_t chunks,
                          int64_t index) {
  IndexRanges found;
  for (int64_t stripe = 0; stripe < stripes; ++stripe) {
    const IndexRanges one = chunk(ranges, stripes, stripe);
    if (one.empty()) break;
    for (const IndexRange& range : chunk(one, chunks, index)) append(found, range);
  }
  return found;
}

IndexRanges joined(std::vector<IndexRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const IndexRange& a, const IndexRange& b) { return a.begin < b.begin; });
  IndexRanges found;
  for (const IndexRange& range : ranges) append(found, range);
  return found;
}

IndexRanges intersection(const IndexRanges& a, const IndexRanges& b) {
  IndexRanges both;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    append(both, {std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)});
    (a[i].end < b[j].end ? i : j) += 1;
  }
  return both;
}

bool contains(const IndexRanges& all, const IndexRanges& part) {
  return intersection(all, part) == part;
}

std::vector<IndexRun> common_runs(const IndexRanges& first, const IndexRanges& second) {
  std::vector<IndexRun> runs;
  int64_t before_first = 0, before_second = 0;
  for (size_t i = 0, j = 0; i < first.size() && j < second.size();) {
    const IndexRange both = {std::max(first[i].begin, second[j].begin),
                             std::min(first[i].end, second[j].end)};
    if (both.count() > 0)
      runs.push_back({.first_position = before_first + both.begin - first[i].begin,
                      .second_position = before_second + both.begin - second[j].begin,
                      .count = both.count()});
    if (first[i].end < second[j].end)
      before_first += first[i++].count();
    else
      before_second += second[j++].count();
  }
  return runs;
}

}  // namespace fsdp
