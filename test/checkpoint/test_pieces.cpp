#include "checkpoint/plan/pieces.hpp"

#include <catch2/catch.hpp>

#include "checkpoint/format/block_sums.hpp"

namespace fsdp::test {
namespace {

TEST_CASE("ranks that hold the same divide it in whole blocks, small tensors in turns", "[checkpoint][pieces]") {
  const auto shares = [](int64_t count, int64_t bytes, int64_t sharers, int64_t turn) {
    std::vector<std::pair<int64_t, int64_t>> all;
    for (int64_t i = 0; i < sharers; ++i) {
      const auto share = share_of(count, bytes, sharers, i, turn);
      all.emplace_back(share.begin, share.end);
    }
    return all;
  };
  using Shares = std::vector<std::pair<int64_t, int64_t>>;
  CHECK(shares(10, 4, 1, 7) == Shares{{0, 10}});
  CHECK(shares(10, 4, 3, 7) == Shares{{0, 0}, {0, 10}, {0, 0}});
  const int64_t block = kBlockBytes / 4;
  CHECK(shares(3 * block + 5, 4, 2, 0) == Shares{{0, 2 * block}, {2 * block, 3 * block + 5}});
  CHECK(shares(block + 1, 4, 4, 0) == Shares{{0, block}, {block, block + 1}, {block + 1, block + 1}, {block + 1, block + 1}});
}

TEST_CASE("a piece is what is together in the file and in memory", "[checkpoint][pieces]") {
  // Columns 2 and 3 of a 3 x 4 tensor of 2 bytes each, which begins at byte 100; positions 1 to 5 of these six.
  const std::vector<ElementRange> ranges{{2, 4}, {6, 8}, {10, 12}};
  std::vector<FilePiece> pieces;
  add_pieces(pieces, 9, ranges, {1, 5}, {.file = 3, .offset = 100, .bytes = 24}, 2);
  REQUIRE(pieces.size() == 3);
  CHECK(pieces[0].offset == 106);
  CHECK(pieces[0].local_begin == 1);
  CHECK(pieces[0].count == 1);
  CHECK(pieces[1].offset == 112);
  CHECK(pieces[1].count == 2);
  CHECK(pieces[2].offset == 120);
  CHECK(pieces[2].local_begin == 4);
  CHECK(pieces[2].count == 1);
  CHECK(pieces[2].file == 3);
  CHECK(pieces[2].tensor == 9);
}

}  // namespace
}  // namespace fsdp::test
