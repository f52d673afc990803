#include "checkpoint/io/piece_writer.hpp"

#include <algorithm>
#include <optional>

#include "checkpoint/io/file.hpp"
#include "checkpoint/io/tensor_bytes.hpp"

namespace fsdp {

namespace {

constexpr int64_t kWindowBytes = 4 * kBlockBytes;
// Shorter pieces are copied together; for longer ones a call of their own costs less.
constexpr size_t kSmallBytes = 64 * 1024;
// How much is written before the disk is asked to begin.
constexpr int64_t kSyncBytes = 16 * kBlockBytes;

/// One file, written from front to back.
class Stream {
 public:
  Stream(const std::string& path, BlockSums& sums) : file_(File::open_to_write(path)), sums_(sums) {}

  void write(int64_t offset, std::span<const std::byte> bytes) {
    if (offset != begin_ + static_cast<int64_t>(pending_.size()) || pending_.size() + bytes.size() > kBlockBytes) flush();
    if (pending_.empty()) begin_ = offset;
    if (bytes.size() < kSmallBytes) {
      pending_.insert(pending_.end(), bytes.begin(), bytes.end());
      return;
    }
    flush();
    put(offset, bytes);
  }

  void finish() {
    flush();
    file_.sync();
  }

 private:
  void flush() {
    if (!pending_.empty()) put(begin_, pending_);
    pending_.clear();
  }

  void put(int64_t offset, std::span<const std::byte> bytes) {
    // Block by block, so that a block is summed and written while it is in the cache.
    while (!bytes.empty()) {
      const auto part = bytes.first(std::min<size_t>(bytes.size(), kBlockBytes - offset % kBlockBytes));
      sums_.add(offset, part);
      file_.write_at(offset, part);
      offset += static_cast<int64_t>(part.size());
      bytes = bytes.subspan(part.size());
      unsynced_ += static_cast<int64_t>(part.size());
      if (unsynced_ < kSyncBytes) continue;
      file_.start_sync(offset - unsynced_, unsynced_);
      unsynced_ = 0;
    }
  }

  File file_;
  BlockSums& sums_;
  std::vector<std::byte> pending_;
  int64_t begin_ = -1, unsynced_ = 0;
};

}  // namespace

void write_pieces(const SavePlan& plan, const std::string& folder, std::vector<BlockSums>& sums) {
  std::optional<Stream> stream;
  std::optional<TensorSource> source;
  const FilePiece* last = nullptr;
  for (const auto& piece : plan.pieces) {
    if (last == nullptr || piece.file != last->file) {
      if (stream) stream->finish();
      stream.emplace(folder + "/" + plan.files.files[piece.file].name, sums[piece.file]);
    }
    if (last == nullptr || piece.tensor != last->tensor)
      source.emplace(plan.tensors[piece.tensor]->local, plan.dtypes[piece.tensor], kWindowBytes);
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(plan.dtypes[piece.tensor]));
    for (int64_t done = 0; done < piece.count;) {
      const int64_t count = std::min(piece.count - done, source->max_count());
      stream->write(piece.offset + done * element_bytes, source->read(piece.local_begin + done, count));
      done += count;
    }
    last = &piece;
  }
  if (stream) stream->finish();
}

}  // namespace fsdp
