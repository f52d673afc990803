#include "checkpoint/checked_file.hpp"

#include <algorithm>
#include <cstring>

#include "checkpoint/block_sums.hpp"
#include "checkpoint/checkpoint_error.hpp"

namespace fsdp {

namespace {

// Unchecked, a longer part of a block is read by itself; for shorter ones the block is kept.
constexpr size_t kLongPart = 64 * 1024;

}  // namespace

CheckedFile::CheckedFile(File file, Catalogue::FileEntry entry, bool verifies,
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
    const int64_t block = offset / kBlockBytes, begin = block * kBlockBytes;
    const int64_t end = std::min(begin + kBlockBytes, entry_.bytes);
    require_checkpoint(offset < end, "{}: ends at byte {}, {} bytes too early", file_.path(), entry_.bytes, into.size());
    const auto part = into.first(std::min<size_t>(into.size(), end - offset));
    const bool is_whole = static_cast<int64_t>(part.size()) == end - begin;
    if (block != kept_index_ && (is_whole || (!verifies_ && part.size() >= kLongPart))) {
      file_.read_at(offset, part);
      if (verifies_) check(block, part);
    } else {
      std::memcpy(part.data(), kept_block(block).data() + (offset - begin), part.size());
    }
    offset += static_cast<int64_t>(part.size());
    into = into.subspan(part.size());
  }
}

std::span<const std::byte> CheckedFile::kept_block(int64_t block) {
  if (block == kept_index_) return kept_;
  kept_index_ = -1;
  kept_.resize(std::min(kBlockBytes, entry_.bytes - block * kBlockBytes));
  file_.read_at(block * kBlockBytes, kept_);
  if (verifies_) check(block, kept_);
  kept_index_ = block;
  return kept_;
}

void CheckedFile::check(int64_t block, std::span<const std::byte> bytes) const {
  const uint32_t found = block_sum(bytes), expected = (*entry_.sums)[block];
  if (found == expected) [[likely]] return;
  const int64_t begin = block * kBlockBytes, end = begin + static_cast<int64_t>(bytes.size());
  throw CheckpointError(fmt::format("{}: bytes {} to {} are damaged: their CRC-32 is {:08x}, the manifest says {:08x}{}",
                                    file_.path(), begin, end, found, expected, tensors_ ? tensors_(begin, end) : ""));
}

}  // namespace fsdp
