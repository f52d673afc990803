#include "checkpoint/format/block_sums.hpp"

#include <isa-l/crc.h>

#include <algorithm>
#include <array>

namespace fsdp {

namespace {

constexpr uint32_t kOnes = 0xFFFFFFFF;
constexpr int64_t kTableStep = 1024;

// Castagnoli's polynomial (RFC 3720, section 12.1) and products modulo it, with x^0 in the highest bit, as registers of
// a reflected CRC have it.
constexpr uint32_t kPolynomial = 0x82F63B78;
constexpr uint32_t kOne = uint32_t{1} << 31;

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) sum ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return sum;
}

/// A register that a zero byte passes through is multiplied by x^8: its powers, for up to a block of zeros.
class ZeroBytes {
 public:
  static const ZeroBytes& get() {
    static const ZeroBytes powers;
    return powers;
  }
  uint32_t carry(uint32_t sum, int64_t zeros) const {
    return product(product(sum, bytes_[zeros % kTableStep]), steps_[zeros / kTableStep]);
  }

 private:
  ZeroBytes() {
    bytes_[0] = steps_[0] = kOne;
    for (int64_t i = 1; i < kTableStep; ++i) bytes_[i] = product(bytes_[i - 1], kOne >> 8);
    const uint32_t step = product(bytes_[kTableStep - 1], bytes_[1]);
    for (int64_t i = 1; i <= kBlockBytes / kTableStep; ++i) steps_[i] = product(steps_[i - 1], step);
  }
  std::array<uint32_t, kTableStep> bytes_{};
  std::array<uint32_t, kBlockBytes / kTableStep + 1> steps_{};
};

/// The register after these bytes; without the inversions that make a sum no longer linear.
uint32_t register_after(std::span<const std::byte> bytes, uint32_t before) {
  // It reads them alone, and takes an int for their number.
  auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(bytes.data()));
  for (; !bytes.empty(); bytes = bytes.subspan(std::min<size_t>(bytes.size(), kBlockBytes))) {
    const auto count = std::min<size_t>(bytes.size(), kBlockBytes);
    before = crc32_iscsi(data, static_cast<int>(count), before);
    data += count;
  }
  return before;
}

}  // namespace

int64_t blocks_of(int64_t file_bytes) {
  return file_bytes / kBlockBytes + (file_bytes % kBlockBytes != 0 ? 1 : 0);
}

uint32_t block_sum(std::span<const std::byte> block, uint32_t before) {
  return ~register_after(block, ~before);
}

BlockSums::BlockSums(int64_t file_bytes) : file_bytes_(file_bytes), parts_(blocks_of(file_bytes)) {}

void BlockSums::add(int64_t offset, std::span<const std::byte> piece) {
  while (!piece.empty()) {
    const int64_t block = offset / kBlockBytes, block_end = std::min((block + 1) * kBlockBytes, file_bytes_);
    const auto part = piece.first(std::min<size_t>(piece.size(), block_end - offset));
    const uint32_t linear = register_after(part, 0);
    offset += static_cast<int64_t>(part.size());
    parts_[block] ^= ZeroBytes::get().carry(linear, block_end - offset);
    piece = piece.subspan(part.size());
  }
}

std::vector<uint32_t> finished_sums(std::vector<uint32_t> parts, int64_t file_bytes) {
  for (size_t block = 0; block < parts.size(); ++block) {
    const int64_t begin = static_cast<int64_t>(block) * kBlockBytes;
    parts[block] ^= ZeroBytes::get().carry(kOnes, std::min(kBlockBytes, file_bytes - begin)) ^ kOnes;
  }
  return parts;
}

}  // namespace fsdp
