#include "checkpoint/block_sums.hpp"

#include <libdeflate.h>
#include <zlib.h>

#include <algorithm>
#include <array>

namespace fsdp {

namespace {

constexpr uint32_t kOnes = 0xFFFFFFFF;
constexpr int64_t kStep = 1024;

/// What carries a sum over a number of zero bytes, for zlib's crc32_combine_op.
class ZeroOperators {
 public:
  static const ZeroOperators& get() {
    static const ZeroOperators operators;
    return operators;
  }
  uint32_t carry(uint32_t sum, int64_t zeros) const {
    if (zeros >= kStep) sum = crc32_combine_op(sum, 0, steps_[zeros / kStep]);
    if (zeros % kStep > 0) sum = crc32_combine_op(sum, 0, bytes_[zeros % kStep]);
    return sum;
  }

 private:
  ZeroOperators() {
    for (int64_t i = 1; i < kStep; ++i) bytes_[i] = crc32_combine_gen(i);
    for (int64_t i = 1; i <= kBlockBytes / kStep; ++i) steps_[i] = crc32_combine_gen(i * kStep);
  }
  std::array<uLong, kStep> bytes_{};
  std::array<uLong, kBlockBytes / kStep + 1> steps_{};
};

}  // namespace

int64_t blocks_of(int64_t file_bytes) {
  return file_bytes / kBlockBytes + (file_bytes % kBlockBytes != 0 ? 1 : 0);
}

uint32_t block_sum(std::span<const std::byte> block) { return libdeflate_crc32(0, block.data(), block.size()); }

BlockSums::BlockSums(int64_t file_bytes) : file_bytes_(file_bytes), parts_(blocks_of(file_bytes)) {}

void BlockSums::add(int64_t offset, std::span<const std::byte> piece) {
  while (!piece.empty()) {
    const int64_t block = offset / kBlockBytes, block_end = std::min((block + 1) * kBlockBytes, file_bytes_);
    const auto part = piece.first(std::min<size_t>(piece.size(), block_end - offset));
    // The register begins and ends as it is, without the inversions that make a sum no longer linear.
    const uint32_t linear = ~libdeflate_crc32(kOnes, part.data(), part.size());
    offset += static_cast<int64_t>(part.size());
    parts_[block] ^= ZeroOperators::get().carry(linear, block_end - offset);
    piece = piece.subspan(part.size());
  }
}

std::vector<uint32_t> finished_sums(std::vector<uint32_t> parts, int64_t file_bytes) {
  for (size_t block = 0; block < parts.size(); ++block) {
    const int64_t begin = static_cast<int64_t>(block) * kBlockBytes;
    parts[block] ^= ZeroOperators::get().carry(kOnes, std::min(kBlockBytes, file_bytes - begin)) ^ kOnes;
  }
  return parts;
}

}  // namespace fsdp
