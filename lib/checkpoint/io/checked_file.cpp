#include "checkpoint/io/checked_file.hpp"

#include <algorithm>
#include <cstring>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/block_sums.hpp"

namespace fsdp {

namespace {

// A longer part of a block is read where it is to be; for shorter ones, many of which a block may have, it is kept.
constexpr size_t kLongPart = 64 * 1024;
// Read and summed at once: what fits into a core's own cache is not fetched from memory a second time.
constexpr size_t kStepBytes = 128 * 1024;

}  // namespace

CheckedFile::CheckedFile(File file, Catalogue::DataFile entry, bool verifies,
                         std::function<std::string(int64_t, int64_t)> tensors)
    : file_(std::move(file)),
      entry_(std::move(entry)),
      verifies_(verifies && entry_.sums.has_value()),
      tensors_(std::move(tensors)) {
  const int64_t bytes = file_.bytes();
  require_checkpoint(bytes == entry_.bytes, "{}: has {} bytes, expected {}", file_.path(), bytes, entry_.bytes);
}

void CheckedFile::read(int64_t offset, std::span<std::byte> into) {
  while (!into.empty()) {
    const int64_t block = offset / kBlockBytes;
    const auto [begin, end] = bytes_of(block);
    require_checkpoint(offset < end, "{}: ends at byte {}, {} bytes too early", file_.path(), entry_.bytes, into.size());
    const auto part = into.first(std::min<size_t>(into.size(), end - offset));
    // What is behind a part that ends within its block is mostly asked for next.
    const bool reaches_end = offset + static_cast<int64_t>(part.size()) == end;
    if (block != kept_index_ && part.size() >= kLongPart && (reaches_end || !verifies_))
      read_part(block, offset, part);
    else
      std::memcpy(part.data(), kept_block(block).data() + (offset - begin), part.size());
    offset += static_cast<int64_t>(part.size());
    into = into.subspan(part.size());
  }
}

/// Straight to where it is to be. What is in front of it in its block is read only to be summed.
void CheckedFile::read_part(int64_t block, int64_t offset, std::span<std::byte> part) {
  if (!verifies_) return file_.read_at(offset, part);
  uint32_t sum = 0;
  const auto read_and_sum = [&](int64_t from, std::span<std::byte> step) {
    file_.read_at(from, step);
    sum = block_sum(step, sum);
  };
  for (int64_t begin = bytes_of(block).begin; begin < offset;) {
    front_.resize(kStepBytes);
    const auto step = std::span(front_).first(std::min<size_t>(kStepBytes, offset - begin));
    read_and_sum(begin, step);
    begin += static_cast<int64_t>(step.size());
  }
  while (!part.empty()) {
    const auto step = part.first(std::min(kStepBytes, part.size()));
    read_and_sum(offset, step);
    offset += static_cast<int64_t>(step.size());
    part = part.subspan(step.size());
  }
  check(block, sum);
}

std::span<const std::byte> CheckedFile::kept_block(int64_t block) {
  if (block == kept_index_) return kept_;
  kept_index_ = -1;
  const auto [begin, end] = bytes_of(block);
  kept_.resize(end - begin);
  read_part(block, begin, kept_);
  kept_index_ = block;
  return kept_;
}

CheckedFile::ByteRange CheckedFile::bytes_of(int64_t block) const {
  const int64_t begin = block * kBlockBytes;
  return {begin, std::min(begin + kBlockBytes, entry_.bytes)};
}

void CheckedFile::check(int64_t block, uint32_t found) const {
  const uint32_t expected = (*entry_.sums)[block];
  if (found == expected) [[likely]] return;
  const auto [begin, end] = bytes_of(block);
  throw CheckpointError(fmt::format("{}: bytes {} to {} are damaged: their CRC-32C is {:08x}, the manifest says {:08x}{}",
                                    file_.path(), begin, end, found, expected, tensors_ ? tensors_(begin, end) : ""));
}

}  // namespace fsdp
