#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace fsdp {

class Communicator;

/// Where the pieces of several tensors lie when W ranks hold one piece of each. All in bytes.
///
/// One rank's pieces: first those that travel from place to place (`is_direct`), then the tail: the
/// others, packed, which travel as one. Piece i starts at `offset(i)`, aligned to 16.
///
/// tensor-major (what an unsharded tensor needs): tensor i's W pieces lie side by side, rank order,
///   from `tensor_offset(i)` on, so that tensor i is contiguous, its padding after its last row.
/// rank-major (what one collective moves): rank r's tail starts at r * tail_bytes(), piece i of it
///   `tail_offset(i)` further on.
class PieceLayout {
 public:
  static constexpr int64_t kPackAll = std::numeric_limits<int64_t>::max();

  PieceLayout() = default;
  /// packs_below: pieces with fewer bytes go to the tail.
  PieceLayout(std::vector<int64_t> piece_bytes, int world_size, int64_t packs_below = kPackAll);
  /// As the group's backend likes it.
  PieceLayout(std::vector<int64_t> piece_bytes, const Communicator& group);

  size_t count() const { return piece_bytes_.size(); }
  int world_size() const { return world_size_; }
  int64_t piece_bytes(size_t i) const { return piece_bytes_[i]; }
  int64_t offset(size_t i) const { return offsets_[i]; }
  /// One rank's pieces with the gaps between them.
  int64_t rank_bytes() const { return rank_bytes_; }
  int64_t tensor_bytes(size_t i) const { return piece_bytes_[i] * world_size_; }
  int64_t tensor_offset(size_t i) const { return offsets_[i] * world_size_; }
  int64_t total_bytes() const { return rank_bytes_ * world_size_; }

  /// What an all-gather allocates: the unsharded tensors, and the tail once more to unpack it from.
  int64_t gather_bytes() const { return total_bytes() + tail_bytes() * world_size_; }

  bool is_direct(size_t i) const { return offsets_[i] < tail_begin_; }
  bool has_direct() const { return tail_begin_ > 0; }
  bool has_tail() const { return tail_bytes() > 0; }
  int64_t tail_begin() const { return tail_begin_; }
  int64_t tail_bytes() const { return rank_bytes_ - tail_begin_; }
  int64_t tail_offset(size_t i) const { return offsets_[i] - tail_begin_; }

  /// The same tensors cut in `world_size` pieces, each of several of these. `world_size` divides ours.
  PieceLayout regrouped(int world_size) const;

 private:
  void place(size_t i);

  std::vector<int64_t> piece_bytes_, offsets_;
  int64_t tail_begin_ = 0, rank_bytes_ = 0;
  int world_size_ = 1;
};

}  // namespace fsdp
