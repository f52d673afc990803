#include "checkpoint/block_sums.hpp"

#include <catch2/catch.hpp>
#include <zlib.h>

#include <algorithm>
#include <random>

namespace fsdp::test {
namespace {

std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 draw(seed);
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(draw());
  return bytes;
}

TEST_CASE("the sums of pieces, cut anywhere and given to any rank, come to zlib's of each block", "[checkpoint][block_sums]") {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 draw(seed);
    const auto bytes = static_cast<int64_t>(seed == 0 ? 0 : seed < 4 ? kBlockBytes * seed : draw() % (3 * kBlockBytes));
    const auto data = random_bytes(bytes, seed + 99);
    std::vector<int64_t> cuts{0, bytes};
    for (uint64_t i = draw() % 60; i > 0 && bytes > 0; --i) cuts.push_back(static_cast<int64_t>(draw() % bytes));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::pair<int64_t, int64_t>> pieces;
    for (size_t i = 1; i < cuts.size(); ++i) pieces.emplace_back(cuts[i - 1], cuts[i]);
    std::shuffle(pieces.begin(), pieces.end(), draw);

    std::vector<BlockSums> ranks(3, BlockSums(bytes));
    for (const auto& [begin, end] : pieces) ranks[draw() % 3].add(begin, std::span(data).subspan(begin, end - begin));
    std::vector<uint32_t> together(blocks_of(bytes), 0);
    for (const auto& rank : ranks)
      for (size_t i = 0; i < together.size(); ++i) together[i] ^= rank.parts()[i];
    const auto sums = finished_sums(together, bytes);

    for (int64_t block = 0; block < blocks_of(bytes); ++block) {
      const int64_t begin = block * kBlockBytes, count = std::min(kBlockBytes, bytes - begin);
      CHECK(sums[block] == crc32(0, reinterpret_cast<const Bytef*>(data.data()) + begin, static_cast<uInt>(count)));
      CHECK(sums[block] == block_sum(std::span(data).subspan(begin, count)));
    }
  }
}

}  // namespace
}  // namespace fsdp::test
