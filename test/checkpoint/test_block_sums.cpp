#include "checkpoint/format/block_sums.hpp"

#include <catch2/catch.hpp>

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

/// CRC-32C bit by bit, as RFC 3720 defines it.
uint32_t crc32c(std::span<const std::byte> bytes) {
  uint32_t sum = 0xFFFFFFFF;
  for (const auto byte : bytes) {
    sum ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? 0x82F63B78 : 0);
  }
  return ~sum;
}

TEST_CASE("a sum is the CRC-32C of RFC 3720's examples, whole or in parts", "[checkpoint][block_sums]") {
  // Section B.4: 32 bytes of zeros, of ones, and from 0 up.
  std::vector<std::byte> zeros(32, std::byte{0}), ones(32, std::byte{0xFF}), rising;
  for (int i = 0; i < 32; ++i) rising.push_back(std::byte(i));
  CHECK(block_sum(zeros) == 0x8A9136AA);
  CHECK(block_sum(ones) == 0x62A8AB43);
  CHECK(block_sum(rising) == 0x46DD794E);
  CHECK(block_sum(std::span(rising).subspan(7), block_sum(std::span(rising).first(7))) == 0x46DD794E);
  CHECK(block_sum({}) == 0);
}

TEST_CASE("the sums of pieces, cut anywhere and given to any rank, come to that of each block", "[checkpoint][block_sums]") {
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
      const auto bytes_of_block = std::span(data).subspan(begin, count);
      CHECK(sums[block] == block_sum(bytes_of_block));
      if (seed < 8) CHECK(sums[block] == crc32c(bytes_of_block));
    }
  }
}

}  // namespace
}  // namespace fsdp::test
