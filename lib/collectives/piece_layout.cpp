#include "collectives/piece_layout.hpp"

#include <algorithm>

#include "fsdp/communicator.hpp"

namespace fsdp {

PieceLayout::PieceLayout(std::vector<Piece> pieces, int world_size, int64_t packs_below, int64_t alignment)
    : pieces_(std::move(pieces)), offsets_(count()), world_size_(world_size) {
  // One without elements has no place of its own: it stays in the order of those that are packed.
  auto is_packed = [&](size_t i) {
    return pieces_[i].bytes < std::max<int64_t>(packs_below, 1) || pieces_[i].outer > 1;
  };
  if (count() == 1) {
    // It has no neighbour to be aligned for or packed with.
    rank_bytes_ = pieces_[0].bytes;
    tail_begin_ = pieces_[0].outer > 1 ? 0 : rank_bytes_;
    return;
  }
  for (size_t i = 0; i < count(); ++i)
    if (!is_packed(i)) place(i, alignment);
  tail_begin_ = rank_bytes_;
  for (size_t i = 0; i < count(); ++i)
    if (is_packed(i)) place(i, alignment);
}

PieceLayout::PieceLayout(std::vector<Piece> pieces, const Communicator& group)
    : PieceLayout(std::move(pieces), group.size(),
                  group.launches_batches() ? group.packs_below() : kPackAll,
                  piece_alignment(group.device_type(), group.size())) {}

void PieceLayout::place(size_t i, int64_t alignment) {
  offsets_[i] = rank_bytes_;
  rank_bytes_ += aligned(pieces_[i].bytes, alignment);
}

PieceLayout PieceLayout::packed() const {
  PieceLayout all = *this;
  all.tail_begin_ = 0;
  return all;
}

PieceLayout PieceLayout::regrouped(int world_size) const {
  // Scaling the offsets too keeps tensor_offset(i) where it is: one unsharded buffer serves both.
  const int64_t factor = world_size_ / world_size;
  PieceLayout scaled = *this;
  for (auto& piece : scaled.pieces_) piece = {.bytes = piece.bytes * factor};
  for (auto& offset : scaled.offsets_) offset *= factor;
  scaled.tail_begin_ *= factor;
  scaled.rank_bytes_ *= factor;
  scaled.world_size_ = world_size;
  return scaled;
}

}  // namespace fsdp
