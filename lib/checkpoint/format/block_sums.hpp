#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

// Note [Sums of blocks that several ranks write]
// A manifest has one CRC-32C for each block of 1 MiB of a file, but ranks' pieces end anywhere, and cut along another
// dimension than the first, every block has pieces of all of them. No rank need see a whole block, nor
// read back what another has written: a CRC is linear. The sum of a block is the XOR of the sums of its pieces, each
// carried on over the zeros that would follow it up to the block's end. So a rank sums what it writes while it is
// still in the cache, and the ranks exchange four bytes a block. An xxhash has no such property; of CRCs, processors have
// instructions for this one.
namespace fsdp {

inline constexpr int64_t kBlockBytes = int64_t{1} << 20;

int64_t blocks_of(int64_t file_bytes);

/// The CRC-32C (Castagnoli's, as iSCSI's) of a block; of one that comes in several parts, with the sum of what came before.
uint32_t block_sum(std::span<const std::byte> block, uint32_t before = 0);

/// What one rank adds to the sums of a file's blocks.
class BlockSums {
 public:
  explicit BlockSums(int64_t file_bytes);
  /// Adds a piece that begins at `offset` of the file; no byte of the file is added twice, by any rank.
  void add(int64_t offset, std::span<const std::byte> piece);
  const std::vector<uint32_t>& parts() const { return parts_; }

 private:
  int64_t file_bytes_;
  std::vector<uint32_t> parts_;
};

/// The sums of a file's blocks from all ranks' parts, XORed together.
std::vector<uint32_t> finished_sums(std::vector<uint32_t> parts, int64_t file_bytes);

}  // namespace fsdp
