#include <catch2/catch.hpp>

#include "support/draw.hpp"
#include "support/printed.hpp"
#include "tensor/index_ranges.hpp"

namespace fsdp::test {
namespace {

std::vector<int64_t> listed(const IndexRanges& ranges) {
  std::vector<int64_t> indices;
  for (const IndexRange& range : ranges)
    for (int64_t index = range.begin; index < range.end; ++index) indices.push_back(index);
  return indices;
}

/// Some of the indices below 20.
IndexRanges draw_ranges(Draw& draw) {
  std::vector<IndexRange> ranges;
  for (int64_t index = 0; index < 20; ++index)
    if (draw.between(0, 1) == 0) ranges.push_back({index, index + 1});
  return joined(std::move(ranges));
}

}  // namespace

TEST_CASE("chunks count positions, not indices", "[tensor][index_ranges]") {
  const IndexRanges ranges = {{0, 2}, {5, 8}, {10, 12}};  // 0 1 5 6 7 10 11
  CHECK(chunk(ranges, 3, 0) == IndexRanges{{0, 2}, {5, 6}});
  CHECK(chunk(ranges, 3, 1) == IndexRanges{{6, 8}, {10, 11}});
  CHECK(chunk(ranges, 3, 2) == IndexRanges{{11, 12}});
  CHECK(chunk(ranges, 4, 3) == IndexRanges{{11, 12}});
  CHECK(chunk(ranges, 5, 4).empty());
  CHECK(chunk(ranges, int64_t{1} << 62, 3) == IndexRanges{{6, 7}});
  CHECK(chunk({}, 2, 0).empty());
}

TEST_CASE("a striped chunk is one of every stripe", "[tensor][index_ranges]") {
  // 9 indices in stripes of 5 and 4, each in four: 0 1 | 2 3 | 4 | - and 5 | 6 | 7 | 8.
  CHECK(striped_chunk(all_indices(9), 2, 4, 0) == IndexRanges{{0, 2}, {5, 6}});
  CHECK(striped_chunk(all_indices(9), 2, 4, 1) == IndexRanges{{2, 4}, {6, 7}});
  CHECK(striped_chunk(all_indices(9), 2, 4, 2) == IndexRanges{{4, 5}, {7, 8}});
  CHECK(striped_chunk(all_indices(9), 2, 4, 3) == IndexRanges{{8, 9}});
  CHECK(striped_chunk(all_indices(2), int64_t{1} << 62, 2, 0) == IndexRanges{{0, 2}});
}

TEST_CASE("ranges that touch are one", "[tensor][index_ranges]") {
  CHECK(joined({{4, 6}, {0, 2}, {2, 4}, {3, 3}}) == IndexRanges{{0, 6}});
  CHECK(all_indices(0).empty());
  CHECK(count(IndexRanges{{1, 3}, {7, 8}}) == 3);
}

TEST_CASE("intersections and common runs are those of the sets", "[tensor][index_ranges]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const IndexRanges a = draw_ranges(draw), b = draw_ranges(draw);
    const auto in_a = listed(a), in_b = listed(b), both = listed(intersection(a, b));
    std::vector<int64_t> expected;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(), std::back_inserter(expected));
    REQUIRE(both == expected);
    REQUIRE(contains(a, intersection(a, b)));
    REQUIRE(contains(a, b) == (expected == in_b));
    std::vector<int64_t> first, second;
    for (const IndexRun& run : common_runs(a, b))
      for (int64_t i = 0; i < run.count; ++i) {
        first.push_back(in_a[run.first_position + i]);
        second.push_back(in_b[run.second_position + i]);
      }
    REQUIRE(first == expected);
    REQUIRE(second == expected);
  }
}

}  // namespace fsdp::test
