#pragma once

#include <c10/core/DeviceType.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace fsdp {

class Communicator;

/// In bytes: every dtype's alignment and one SSE register.
inline constexpr int64_t kPieceAlignment = 16;
/// Aligns pieces whose W together, side by side, begin where an allocation of their own would on such a device: kernels that
/// were tuned on allocations meet nothing else. CUDA's begin at multiples of 512.
constexpr int64_t piece_alignment(c10::DeviceType device, int world_size) {
  constexpr int64_t kCudaAlignment = 512;
  if (device != c10::DeviceType::CUDA) return kPieceAlignment;
  return std::max(kPieceAlignment, kCudaAlignment / std::gcd(kCudaAlignment, int64_t{world_size}));
}
/// `bytes` and what is to lie behind them so that the next piece is aligned.
constexpr int64_t aligned(int64_t bytes, int64_t alignment = kPieceAlignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// What W ranks hold one piece each of. All in bytes.
struct Piece {
  int64_t bytes = 0;  ///< padded: the same on every rank
  /// Unsharded, it is [outer][rows][row_bytes], and the ranks hold chunks of the rows: with outer above
  /// 1 the pieces do not lie side by side. Then a piece is packed, and rows and row_bytes count.
  int64_t outer = 1;
  int64_t rows = 0;
  int64_t row_bytes = 0;
};

/// Where the pieces of several tensors lie when W ranks hold one piece of each. All in bytes.
///
/// One rank's pieces: first those that travel from place to place (`is_direct`), then the tail: the
/// others, packed, which travel as one. Piece i starts at `offset(i)`, aligned to 16 or to what the device wants.
///
/// tensor-major (what an unsharded tensor needs): tensor i lies from `tensor_offset(i)` on, its W pieces
///   side by side in rank order, its padding after its last row; with outer above 1 its rows in their
///   own order and all padding at its end.
/// rank-major (what one collective moves): rank r's tail starts at r * tail_bytes(), piece i of it
///   `tail_offset(i)` further on.
class PieceLayout {
 public:
  static constexpr int64_t kPackAll = std::numeric_limits<int64_t>::max();

  PieceLayout() = default;
  /// packs_below: pieces with fewer bytes go to the tail.
  PieceLayout(std::vector<Piece> pieces, int world_size, int64_t packs_below = kPackAll,
              int64_t alignment = kPieceAlignment);
  /// As the group's backend and its device like it.
  PieceLayout(std::vector<Piece> pieces, const Communicator& group);

  size_t count() const { return pieces_.size(); }
  int world_size() const { return world_size_; }
  const Piece& piece(size_t i) const { return pieces_[i]; }
  int64_t piece_bytes(size_t i) const { return pieces_[i].bytes; }
  int64_t offset(size_t i) const { return offsets_[i]; }
  /// One rank's pieces with the gaps between them.
  int64_t rank_bytes() const { return rank_bytes_; }
  int64_t tensor_bytes(size_t i) const { return pieces_[i].bytes * world_size_; }
  int64_t tensor_offset(size_t i) const { return offsets_[i] * world_size_; }
  int64_t total_bytes() const { return rank_bytes_ * world_size_; }

  bool is_direct(size_t i) const { return offsets_[i] < tail_begin_; }
  bool has_direct() const { return tail_begin_ > 0; }
  bool has_tail() const { return tail_bytes() > 0; }
  int64_t tail_begin() const { return tail_begin_; }
  int64_t tail_bytes() const { return rank_bytes_ - tail_begin_; }
  int64_t tail_offset(size_t i) const { return offsets_[i] - tail_begin_; }

  /// Has the same pieces at the same places, all of them packed: nothing travels from place to place.
  PieceLayout packed() const;

  /// Cuts the same unsharded tensors in `world_size` pieces, each of as many bytes, as they lie in memory,
  /// as several of these. `world_size` divides ours.
  PieceLayout regrouped(int world_size) const;

 private:
  void place(size_t i, int64_t alignment);

  std::vector<Piece> pieces_;
  std::vector<int64_t> offsets_;
  int64_t tail_begin_ = 0, rank_bytes_ = 0;
  int world_size_ = 1;
};

}  // namespace fsdp
