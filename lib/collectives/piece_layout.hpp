#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

/// Where the pieces of several tensors lie when W ranks hold one piece of each. All in bytes.
///
/// packed (one rank's pieces): piece i starts at `offset(i)`, aligned to 16. A single piece is not padded.
/// rank-major (what one collective moves): rank r's packed pieces start at r * packed_bytes().
/// tensor-major (what an unsharded tensor needs): tensor i's W pieces lie side by side, rank order,
///   from `tensor_offset(i)` on, so that tensor i is contiguous, its padding after its last row.
class PieceLayout {
 public:
  PieceLayout() = default;
  PieceLayout(std::vector<int64_t> piece_bytes, int world_size);

  size_t count() const { return piece_bytes_.size(); }
  int world_size() const { return world_size_; }
  int64_t piece_bytes(size_t i) const { return piece_bytes_[i]; }
  int64_t offset(size_t i) const { return offsets_[i]; }
  int64_t packed_bytes() const { return packed_bytes_; }
  int64_t tensor_bytes(size_t i) const { return piece_bytes_[i] * world_size_; }
  int64_t tensor_offset(size_t i) const { return offsets_[i] * world_size_; }
  int64_t total_bytes() const { return packed_bytes_ * world_size_; }
  /// True if rank-major and tensor-major are the same bytes, so that nothing has to be copied.
  bool is_single_piece() const { return count() == 1; }

  /// The same tensors cut in `world_size` pieces, each of several of these. `world_size` divides ours.
  PieceLayout regrouped(int world_size) const;

 private:
  PieceLayout(std::vector<int64_t> piece_bytes, std::vector<int64_t> offsets, int64_t packed_bytes,
              int world_size)
      : piece_bytes_(std::move(piece_bytes)),
        offsets_(std::move(offsets)),
        packed_bytes_(packed_bytes),
        world_size_(world_size) {}

  std::vector<int64_t> piece_bytes_, offsets_;
  int64_t packed_bytes_ = 0;
  int world_size_ = 1;
};

}  // namespace fsdp
